"""`kubectl apply -k deploy/kubernetes/overlays/demo` on an otherwise empty cluster, then the whole demo.

The cluster has only Kueue and JobSet.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from rich.console import Console

from deploy.demo_cluster import NAMESPACE, RECIPE, wait_for_api
from hanzo_ml.demo import Chain, run_chain
from recipes.contracts.recipe import Recipe
from recipes.storage.base_model_folder import hash_model_folder
from tests.cluster.build import Cache
from tests.cluster.cluster import Cluster
from tests.cluster.demo_installation import JOBS_NAMESPACE, DemoInstallation
from tests.cluster.demo_questions import QUESTION
from tests.cluster.installation import REPOSITORY
from tests.cluster.trainings import GANG_RECIPE
from tests.deploy.kustomization import FOLDERS, render
from tests.recipes.tiny_model import make_tiny_model

pytestmark = pytest.mark.cluster
MODEL = "first-model"
CONNECT = """
import socket, time
deadline = time.monotonic() + 15  # until the node knows the address of this new pod, it refuses whatever the policy allows
while True:
    try:
        socket.create_connection(("postgres.hanzo.svc", 5432), 5)
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.5)
print("connected")
"""


@pytest.fixture(scope="module")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoInstallation]:
    with DemoInstallation(cluster, tmp_path_factory.mktemp("demo")) as installation:
        console = Console()
        installation.demo.apply(console)
        installation.demo.wait_until_ready(console)
        yield installation


@pytest.fixture(scope="module")
def base_model(installed: DemoInstallation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Store a tiny model in the object store instead of a package.

    Under sign-in, users may name no other base models.
    """
    folder = make_tiny_model(tmp_path_factory.mktemp("base") / "model")
    reference = {"uri": "pypi://tiny-llama", "sha256": hash_model_folder(folder)}
    named = Recipe.named(RECIPE).changed({"base_model": reference}).base_model
    assert named.artifact_uri is not None
    with installed.demo.object_store() as store:
        store.publish(folder, named.artifact_uri, "base", facts=reference)
    return reference


@pytest.mark.parametrize("name", FOLDERS)
def test_kubectl_makes_the_objects_that_tests_without_a_cluster_check(name: str) -> None:
    command = [str(Cache().program("kubectl")), "kustomize", str(FOLDERS[name])]
    made = list(yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    expected = {(item["kind"], item["metadata"]["name"]): item for item in made}
    objects = {(item["kind"], item["metadata"]["name"]): item for item in render(FOLDERS[name])}
    assert set(objects) == set(expected)
    for key, item in objects.items():
        if key[0] in ("NetworkPolicy", "ConfigMap", "Service", "Role", "Namespace"):
            assert item == expected[key]


@pytest.mark.requirement("A2", "A3", "A7", "A10", "P2")
def test_raw_data_becomes_a_proved_model_that_an_engine_pod_serves(
    installed: DemoInstallation, base_model: dict[str, str]
) -> None:
    request = {"name": MODEL, "dataset": "ellarin", "parameters": GANG_RECIPE | {"base_model": base_model}}
    with installed.demo.connected(("hanzo-ml", 8057), ("engine", 8043)) as [api, engine]:
        wait_for_api(api)
        with installed.environment_of_client(api):
            run_chain(Console(), Chain(engine, request, MODEL, (QUESTION,)))
            assert "proved" in run_cli("model", "prove", MODEL, "1")
            jobs = {job["name"]: job for job in json.loads(run_cli("job", "list", "--json"))}
            shown = json.loads(run_cli("job", "get", jobs[MODEL]["id"]))
            assert shown["status"] == "completed", shown
            programs = {program["program"]: program["phase"] for program in shown["cluster"]}
            assert programs["train"] == "succeeded", programs
        assert httpx.get(f"{api}/v1/jobs", trust_env=False).status_code == 401


def test_database_is_reached_by_the_control_plane_alone(installed: DemoInstallation) -> None:
    """Both namespaces make the same connection, so the policy causes the refusal."""
    assert run_in_pod(installed, NAMESPACE, CONNECT).endswith("connected")
    assert "Error" in run_in_pod(installed, JOBS_NAMESPACE, CONNECT)


def run_in_pod(installed: DemoInstallation, namespace: str, code: str) -> str:
    """Return the output of Python code in a pod without product labels."""
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    claim = "dependencies"
    mount = {"name": claim, "mountPath": "/opt/hanzo-ml/dependencies", "readOnly": True}
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "probe",
                    "image": "localhost/hanzo-ml:1",
                    "command": ["python", "-c", code],
                    "securityContext": restricted,
                    "volumeMounts": [mount],
                }
            ],
            "volumes": [{"name": claim, "persistentVolumeClaim": {"claimName": claim}}],
        },
    }
    cluster, here = installed.cluster, f"--namespace={namespace}"
    cluster.apply(pod)
    try:
        ended = "--for=jsonpath={.status.containerStatuses[0].state.terminated.reason}"
        cluster.kubectl("wait", "pod/probe", here, ended, "--timeout=60s")
        return cluster.kubectl("logs", "probe", here).strip()
    finally:
        cluster.kubectl("delete", "pod", "probe", here, "--now")


def run_cli(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hanzo_ml", *words],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
