"""deploy/kubernetes with the images of deploy/images on the test cluster.

PostgreSQL and S3 of the test cluster are its only storage.
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from deploy.demo_cluster import NAMESPACE, RECIPE, SECRET, SIGN_IN, SIGN_IN_KEY, DemoCluster, wait_for_api
from recipes.contracts.recipe import Recipe
from recipes.storage.artifact_store import Store
from recipes.storage.base_model_folder import hash_model_folder
from tests.cluster.cluster import ROOT, Cluster
from tests.cluster.demo_installation import CAPACITY, JOBS_NAMESPACE
from tests.cluster.dependencies import CLAIM
from tests.cluster.images import DEPENDENCIES, JOB_IMAGE
from tests.cluster.installation import GPU_TYPE
from tests.cluster.product_images import CONTROL_PLANE_IMAGE, ENGINE_IMAGE, TAG
from tests.recipes.tiny_model import make_tiny_model

HERE = f"--namespace={NAMESPACE}"
READY_WITHIN = "--timeout=400s"


class ExternalInstallation:
    """What an administrator keeps outside of the cluster.

    That is database, objects, and the keys, which are applied each time.
    """

    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster = cluster
        self.home = home
        self._database_name = f"external_{os.getpid()}"
        self.database = cluster.postgres.create_database(self._database_name)
        self.demo = DemoCluster(cluster.kubectl_command(), home / "overlay", home / "overlay" / "config.yaml")
        self._keys = make_keys(self.database, cluster)

    def __enter__(self) -> Self:
        label = f"ml.hanzo.ai/gpu-type={GPU_TYPE}"
        self.cluster.kubectl("label", "nodes", "--all", label, "--overwrite")
        return self

    def __exit__(self, *_: object) -> None:
        if not self.demo.overlay.exists():
            return
        self.delete()

    def apply(self, checkout: Path = ROOT, tag: str = TAG) -> None:
        """Apply a checkout, whose images have this tag, and wait until everything is ready."""
        self.cluster.load_product_images(checkout, tag)
        for namespace in (NAMESPACE, JOBS_NAMESPACE):
            self.cluster.create_namespace(namespace, checkout=checkout)
        self.cluster.apply(*self._keys)
        self._write_overlay(checkout, tag)
        self.cluster.kubectl("apply", f"--kustomize={self.demo.overlay}")
        self.cluster.kubectl("apply", "--filename=-", document=self.demo.render_queues())
        for deployment in self.cluster.get("deployments", HERE)["items"]:
            found = self.demo.try_run(
                "rollout", "status", f"deployment/{deployment['metadata']['name']}", HERE, READY_WITHIN
            )
            assert found.returncode == 0, self.demo.describe()

    def delete(self) -> None:
        """Run `kubectl delete -k` and remove the queues; database and objects stay outside."""
        self.demo.remove()
        for namespace in (JOBS_NAMESPACE, NAMESPACE):
            self.cluster.kubectl("delete", "persistentvolume", f"{CLAIM}-{namespace}", "--ignore-not-found")

    def running_pods(self) -> list[dict[str, Any]]:
        return [pod for pod in self.cluster.get("pods", HERE)["items"] if pod["status"]["phase"] == "Running"]

    def lose_database(self) -> None:
        """Replace the database by an empty one."""
        self.cluster.postgres.drop_database(self._database_name)
        self.cluster.postgres.create_database(self._database_name)

    @contextmanager
    def connected(self) -> Iterator[httpx.Client]:
        """Connect to the API as an administrator."""
        with self.demo.connected(("hanzo-ml", 8057)) as [api]:
            wait_for_api(api)
            headers = {"Authorization": f"Bearer {self.demo.sign_token()}"}
            with httpx.Client(base_url=api, headers=headers, timeout=120, trust_env=False) as http:
                yield http

    def store_base_model(self, scratch: Path) -> dict[str, str]:
        """Store a tiny model as that of a package, and return its reference."""
        folder = make_tiny_model(scratch / "model")
        reference = {"uri": "pypi://tiny-llama", "sha256": hash_model_folder(folder)}
        named = Recipe.named(RECIPE).changed({"base_model": reference}).base_model
        assert named.artifact_uri is not None
        keys = {name: self.cluster.s3.variables[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        Store(self.demo.settings.store, keys).publish(folder, named.artifact_uri, "base", facts=reference)
        return reference

    def _write_overlay(self, checkout: Path, tag: str) -> None:
        folder, source = self.demo.overlay, checkout / "deploy" / "kubernetes"
        folder.mkdir(parents=True, exist_ok=True)
        config = change(yaml.safe_load((source / "base" / "config.yaml").read_text()), self._changes(tag))
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(source.resolve(), folder.resolve())],
            "images": [{"name": name.removeprefix("docker.io/"), "newName": name, "newTag": tag}
                       for name in (CONTROL_PLANE_IMAGE, ENGINE_IMAGE)],
            "patches": [{"patch": (source / "overlays" / "demo" / "sign-in.yaml").read_text()}],
            "configMapGenerator": [
                {"name": "hanzo-ml", "namespace": NAMESPACE, "behavior": "replace", "files": ["config.yaml"]}
            ],
            "generatorOptions": {"disableNameSuffixHash": True},
        }  # fmt: skip
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))

    def _changes(self, tag: str) -> dict[str, dict[str, Any]]:
        """Return what an administrator sets in the configuration."""
        return {
            "storage": {"endpoint": self.cluster.s3.url, "encryption": "none"},
            "auth": {"iam_url": "http://127.0.0.1:8099"},  # sign-in.yaml
            "dagster": {"run_pods": {"image": f"{CONTROL_PLANE_IMAGE}:{tag}"}},
            "scheduler": {
                "default_image": JOB_IMAGE,
                "volumes": [{"claim": CLAIM, "path": DEPENDENCIES, "read_only": True}],
                "capacity": CAPACITY,
                "egress": [{"cidr": f"{self.cluster.address}/32", "ports": [53]}],  # DNS is not a pod here
            },
        }


def change(config: dict[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return config | {section: config.get(section, {}) | dict(values) for section, values in changes.items()}


def make_keys(database: str, cluster: Cluster) -> list[dict[str, Any]]:
    """Create the Secrets, and the public key of the sign-in server's substitute."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = json.loads(ECAlgorithm.to_jwk(key.public_key())) | {"kid": "demo", "use": "sig", "alg": "ES256"}
    values = {
        "database-url": database,
        "storage-access-key": cluster.s3.access_key,
        "storage-secret-key": cluster.s3.secret_key,
        "engine-token": secrets.token_hex(32),
    }
    return [
        {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE}, **content}
        for kind, name, content in (
            ("ConfigMap", SIGN_IN, {"data": {"jwks.json": json.dumps({"keys": [public]})}}),
            ("Secret", SIGN_IN_KEY, {"stringData": {"key": private.decode()}}),
            ("Secret", SECRET, {"stringData": values}),
        )
    ]
