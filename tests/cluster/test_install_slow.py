"""An installation under load: a rolling update and kills lose no acknowledged write."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import pytest
from rich.console import Console

from deploy.demo_cluster import NAMESPACE, wait_for_api
from tests.cluster.cluster import Cluster
from tests.cluster.demo_installation import JOBS_NAMESPACE, DemoInstallation
from tests.cluster.dependencies import CLAIM
from tests.cluster.images import DEPENDENCIES, JOB_IMAGE
from tests.cluster.install_load import MLFLOW, artifact_content
from tests.cluster.installation import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.install_slow]
SERVICES = ("hanzo-ml", "code-server", "dagster-daemon", "dagster-webserver", "controller", "engine")
READY_WITHIN = "--timeout=300s"
HERE = f"--namespace={NAMESPACE}"
ENDED = ("completed", "failed", "cancelled")
WARM_UP_SECONDS = 5.0
"""Duration of load before and after what is tested."""
ENDLESS = "import time\nwhile True:\n    print('works', flush=True)\n    time.sleep(1)"


@dataclass
class Written:
    """The writes that the API acknowledged."""

    run_id: str = ""
    artifacts: str = ""
    numbers: dict[str, list[int]] = field(default_factory=lambda: {"metric": [], "artifact": [], "job": []})
    jobs: list[str] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoInstallation]:
    with DemoInstallation(cluster, tmp_path_factory.mktemp("demo")) as installation:
        installation.write_overlay({"scheduler": {"user_commands": True}})
        installation.demo.apply(Console())
        installation.demo.wait_until_ready(Console())
        yield installation


@pytest.fixture(scope="module")
def endless(installed: DemoInstallation) -> str:
    """Submit a job that never ends by itself."""
    with connected(installed) as http:
        document = {"name": "endless", "command": ["python", "-c", ENDLESS], "resources": {"cpu": 1, "memory": "128Mi"}}
        job = str(http.post("/v1/jobs", json=document).raise_for_status().json()["id"])
        wait_until(lambda: read_job(http, job)["status"] == "running", 180, lambda: str(read_job(http, job)))
    return job


@contextmanager
def connected(installed: DemoInstallation) -> Iterator[httpx.Client]:
    with installed.demo.connected(("hanzo-ml", 8057)) as [api]:
        wait_for_api(api)
        headers = {"Authorization": f"Bearer {installed.demo.sign_token()}"}
        with httpx.Client(base_url=api, headers=headers, timeout=60, trust_env=False) as http:
            yield http


@contextmanager
def load(installed: DemoInstallation) -> Iterator[Written]:
    """Create load by a pod during the block.

    Afterwards the result has what was acknowledged.
    """
    name, cluster, written = f"load-{uuid4().hex[:6]}", installed.cluster, Written()
    cluster.apply(load_pod(name, installed.demo.sign_token()))
    try:
        cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", HERE, READY_WITHIN)
        wait_until(lambda: '"job"' in cluster.kubectl("logs", name, HERE), 60, lambda: cluster.kubectl("logs", name, HERE))
        time.sleep(WARM_UP_SECONDS)
        yield written
        time.sleep(WARM_UP_SECONDS)
        cluster.kubectl("exec", name, HERE, "--", "python", "-c", "import os; os.kill(1, 15)")
        wait_until(lambda: '"end"' in cluster.kubectl("logs", name, HERE, "--tail=1"), 60, lambda: f"{name} does not end")
        for line in map(json.loads, cluster.kubectl("logs", name, HERE).splitlines()):
            record(line, written)
    finally:
        cluster.kubectl("delete", "pod", name, HERE, "--now")


def record(line: dict[str, Any], written: Written) -> None:
    if line["kind"] == "run":
        written.run_id, written.artifacts = line["id"], line["artifacts"]
    elif line["kind"] in written.numbers:
        written.numbers[line["kind"]].append(line["number"])
        written.failures.update(line["failures"])
        written.jobs += [line["id"]] if "id" in line else []


def load_pod(name: str, token: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "load",
                    "image": JOB_IMAGE,
                    "command": ["python", "-m", "tests.cluster.install_load", "http://hanzo-ml.hanzo.svc:8057"],
                    "env": [{"name": "TOKEN", "value": token}],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": CLAIM, "mountPath": DEPENDENCIES, "readOnly": True}],
                }
            ],
            "volumes": [{"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    }


def assert_nothing_lost(installed: DemoInstallation, written: Written, endless: str) -> None:
    """Assert that every acknowledged write is stored, and every submitted job completes.

    The job that ran still runs in its pod.
    """
    assert all(written.numbers.values())
    with connected(installed) as http:
        assert set(written.numbers["metric"]) <= read_steps(http, written.run_id)
        for number in written.numbers["artifact"]:
            answer = http.get(f"/api/2.0/mlflow-artifacts/artifacts/{written.artifacts}/{number}.txt")
            assert answer.content == artifact_content(number), number
        assert len(set(written.jobs)) == len(written.jobs)
        for job in written.jobs:
            assert wait_for_end(http, job)["status"] == "completed", read_job(http, job)
        assert read_job(http, endless)["status"] == "running", read_job(http, endless)


def read_steps(http: httpx.Client, run_id: str) -> set[int]:
    """Steps of the metric that the load logs."""
    steps: set[int] = set()
    query: dict[str, str | int] = {"run_id": run_id, "metric_key": "load", "max_results": 25000}
    while True:
        page = http.get(f"{MLFLOW}/metrics/get-history", params=query).raise_for_status().json()
        steps |= {int(point["step"]) for point in page["metrics"]}
        if not page.get("next_page_token"):
            return steps
        query["page_token"] = page["next_page_token"]


def wait_for_end(http: httpx.Client, job: str) -> dict[str, Any]:
    wait_until(lambda: read_job(http, job)["status"] in ENDED, 300, lambda: str(read_job(http, job)))
    return read_job(http, job)


def read_job(http: httpx.Client, job: str) -> dict[str, Any]:
    return dict(http.get(f"/v1/jobs/{job}").raise_for_status().json())


def gang_pod(installed: DemoInstallation, job: str) -> str:
    """Return the pod of a job with one node."""
    pods = installed.cluster.get("pods", f"--namespace={JOBS_NAMESPACE}", "--selector=app=hanzo-ml-job")["items"]
    [uid] = [pod["metadata"]["uid"] for pod in pods if job in pod["metadata"]["annotations"].values()]
    return str(uid)


def report(name: str, written: Written) -> None:
    counts = {kind: len(numbers) for kind, numbers in written.numbers.items()}
    print(f"{name}: acknowledged {counts}, failed requests {dict(written.failures)}")


def test_rolling_update_loses_no_write_and_ends_no_job(installed: DemoInstallation, endless: str) -> None:
    before = gang_pod(installed, endless)
    with load(installed) as written:
        for name in SERVICES:
            installed.cluster.kubectl("rollout", "restart", f"deployment/{name}", HERE)
            installed.cluster.kubectl("rollout", "status", f"deployment/{name}", HERE, READY_WITHIN)
    report("rolling update", written)
    assert not written.failures, "the API answers without a gap"
    assert_nothing_lost(installed, written, endless)
    assert gang_pod(installed, endless) == before


@pytest.mark.parametrize("name", SERVICES)
def test_killed_pod_of_a_deployment_loses_nothing(installed: DemoInstallation, endless: str, name: str) -> None:
    before = gang_pod(installed, endless)
    with load(installed) as written:
        [pod, *_] = installed.pods(name)
        force = ("--force", "--grace-period=0")
        installed.cluster.kubectl("delete", "pod", pod["metadata"]["name"], HERE, *force)
        installed.cluster.kubectl("rollout", "status", f"deployment/{name}", HERE, READY_WITHIN)
    report(name, written)
    assert_nothing_lost(installed, written, endless)
    assert gang_pod(installed, endless) == before


def test_database_that_ends_and_starts_again_loses_nothing(installed: DemoInstallation, endless: str) -> None:
    """Only its container, so that the volume remains, which here has the pod's lifetime."""
    with load(installed) as written:
        installed.cluster.kubectl("exec", "deployment/postgres", HERE, "--", "sh", "-c", "kill -QUIT 1")
        installed.cluster.kubectl("rollout", "status", "deployment/postgres", HERE, READY_WITHIN)
        for name in SERVICES:
            installed.cluster.kubectl("rollout", "status", f"deployment/{name}", HERE, READY_WITHIN)
    report("postgres", written)
    assert_nothing_lost(installed, written, endless)
