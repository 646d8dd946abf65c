"""The overlay `demo` of deploy/kubernetes, unmodified except for images of the test cluster."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from deploy.demo_cluster import NAMESPACE, OVERLAY, DemoCluster, environment
from tests.cluster.cluster import Cluster
from tests.cluster.demo_images import POSTGRES_IMAGE, S3_IMAGE, demo_images
from tests.cluster.dependencies import CLAIM
from tests.cluster.images import DEPENDENCIES, JOB_IMAGE
from tests.cluster.installation import GPU_TYPE

JOBS_NAMESPACE = "hanzo-ml"
IMAGES = {
    "hanzoai/ml": JOB_IMAGE,
    "hanzoai/ml-engine": JOB_IMAGE,
    "docker.io/library/postgres": POSTGRES_IMAGE,
    "ghcr.io/versity/versitygw": S3_IMAGE,
}
"""The job image has no packages: its pods mount them (dependencies.py)."""
CAPACITY = {"cpu": {"cpu": 32, "memory": "64Gi"}, GPU_TYPE: {"gpus": 8, "cpu": 32, "memory": "64Gi"}}


class DemoInstallation:
    """Creates the namespaces with their claims, and removes everything at the end.

    Only one at a time fits on a cluster.
    """

    def __init__(self, cluster: Cluster, home: Path, overlay: Path = OVERLAY, keys: Mapping[str, str] | None = None) -> None:
        self.cluster = cluster
        self.home = home
        self.folder = home / "overlay"
        self._overlay = overlay
        self.demo = DemoCluster(cluster.kubectl_command(), self.folder, self.folder / "config.yaml", keys or {})

    def __enter__(self) -> Self:
        for image in demo_images(self.cluster.cache):
            for node in self.cluster.nodes.values():
                node.import_image(image)
        for namespace in (NAMESPACE, JOBS_NAMESPACE):
            self.cluster.delete_namespace(namespace)  # left by a killed test run
            self.cluster.create_namespace(namespace)
        label = f"{self.write_overlay().settings.scheduler.gpu_type_label}={GPU_TYPE}"
        self.cluster.kubectl("label", "nodes", "--all", label, "--overwrite")
        return self

    def __exit__(self, *_: object) -> None:
        self.demo.remove()
        for namespace in (JOBS_NAMESPACE, NAMESPACE):
            self.cluster.delete_namespace(namespace)

    def write_overlay(self, changes: Mapping[str, Any] | None = None) -> DemoCluster:
        """Write an overlay of the demo; `changes` are to sections of its configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = yaml.safe_load((self._overlay / "config.yaml").read_text())
        config["dagster"]["run_pods"]["image"] = JOB_IMAGE
        config["scheduler"] |= {
            "default_image": JOB_IMAGE,
            "volumes": [{"claim": CLAIM, "path": DEPENDENCIES, "read_only": True}],
            "capacity": CAPACITY,
            "egress": [{"cidr": f"{self.cluster.address}/32", "ports": [53]}],  # DNS is no pod here
        }
        for section, values in (changes or {}).items():
            config[section] = config.get(section, {}) | values
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        rendered = yaml.safe_load_all(self.cluster.kubectl("kustomize", str(self._overlay)))
        patches = [patch for item in rendered if (patch := patch_for_nodes(item))]
        document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(self._overlay.resolve(), self.folder.resolve())],
            "images": [
                {"name": name, "newName": image.rpartition(":")[0], "newTag": image.rpartition(":")[2]}
                for name, image in IMAGES.items()
            ],
            "patches": [{"patch": yaml.safe_dump(patch)} for patch in patches],
            "configMapGenerator": [
                {"name": "hanzo-ml", "namespace": NAMESPACE, "behavior": "replace", "files": ["config.yaml"]}
            ],
            "generatorOptions": {"disableNameSuffixHash": True},
        }
        (self.folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
        return self.demo

    def environment_of_client(self, api: str) -> Any:
        """Return the environment of an administrator's command line."""
        return environment(self.demo.client_environment(api))

    def pods(self, app: str) -> list[dict[str, Any]]:
        found = self.cluster.get("pods", f"--namespace={NAMESPACE}", f"--selector=app={app}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def patch_for_nodes(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Add what a Deployment needs here in addition.

    That is the claim with the packages, and volumes that need no provisioner.
    """
    names = {key: item[key] for key in ("apiVersion", "kind")} | {"metadata": item["metadata"]}
    if item["kind"] == "PersistentVolumeClaim":
        return {**names, "$patch": "delete"}
    if item["kind"] != "Deployment":
        return None
    pod = item["spec"]["template"]["spec"]
    volumes: list[dict[str, Any]] = [
        {"name": volume["name"], "persistentVolumeClaim": None, "emptyDir": {}}
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    changed: dict[str, Any] = {}
    for kind in ("initContainers", "containers"):
        ours = [each["name"] for each in pod.get(kind, ()) if each["image"].startswith("hanzoai/")]
        mount = {"name": CLAIM, "mountPath": DEPENDENCIES, "readOnly": True}
        if ours:
            changed[kind] = [{"name": name, "volumeMounts": [mount]} for name in ours]
    if changed:
        volumes.append({"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM}})
    spec = {"template": {"spec": {**changed, "volumes": volumes}}}
    return {**names, "spec": spec}
