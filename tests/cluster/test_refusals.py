"""Errors of users and operators that a cluster would hide are shown to them."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml

from recipes.contracts.exit_reason import ExitReason
from resources.compute.base import Phase
from resources.compute.kubernetes.cluster import CONFIG_MAP, open_cluster
from tests.cluster.cluster import Cluster
from tests.cluster.command_jobs import GREET, objects, submit
from tests.cluster.installation import Installation, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

GPUS = 2


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("installation")
    own_class = {"priority_classes": {"low": f"low-{uuid4().hex[:6]}"}}
    with Installation(cluster, "refusals", folder, gpus=GPUS, scheduler=own_class) as installation:
        yield installation


def test_missing_priority_class_is_named_until_it_is_there(installation: Installation) -> None:
    name = installation.settings.scheduler.priority_classes.low
    found = installation.cluster.get("workloadpriorityclasses", name)
    installation.cluster.kubectl("delete", "workloadpriorityclass", name)
    job = submit(installation, GREET, schedule={"priority": "low"})
    words = f"Kueue has no WorkloadPriorityClass '{name}'"
    wait_until(lambda: words in installation.observe(job).detail, 60, lambda: installation.describe(job))
    kept = {"name": name, "labels": found["metadata"]["labels"]}
    installation.cluster.apply({key: found[key] for key in ("apiVersion", "kind", "value")} | {"metadata": kept})
    installation.wait_for(job, Phase.SUCCEEDED)


def test_queued_job_names_only_the_requested_flavor(installation: Installation) -> None:
    job = submit(installation, GREET, gpus=GPUS + 1)
    wait_until(lambda: "nvidia.com/gpu" in installation.observe(job).detail, 60, lambda: installation.describe(job))
    detail = installation.observe(job).detail
    assert "in flavor nvidia-a100-80gb" in detail and "flavor cpu" not in detail
    installation.compute.cancel(job)
    installation.wait_for(job, Phase.FAILED)


def test_pods_refused_by_the_api_server_fail_the_job_with_its_message(installation: Installation) -> None:
    job = submit(installation, GREET, pod={"node_selector": {"a..b/rack": "one"}})
    ended = installation.wait_for(job, Phase.FAILED, within=60)
    assert ended.reason is ExitReason.BAD_CONFIGURATION
    assert "Job.batch" in ended.detail and "a..b/rack" in ended.detail
    assert objects(installation, job) == []


def test_wrong_object_store_keys_fail_the_job_with_the_settings_named(installation: Installation) -> None:
    file = installation.home / "config.yaml"
    right = file.read_text()
    wrong: dict[str, Any] = yaml.safe_load(right)
    wrong["storage"]["secret_key"] = "another-secret-key"
    try:
        restart_api(installation, yaml.safe_dump(wrong))
        job = submit(installation, GREET, schedule={"retries": 0})
        ended = installation.wait_for(
            job, Phase.FAILED, within=150
        )  # requests to an unavailable store are retried for 180 s
        assert ended.reason is ExitReason.STORAGE_DENIED
        assert "storage.access_key" in ended.detail and "storage.secret_key" in ended.detail
    finally:
        restart_api(installation, right)


def restart_api(installation: Installation, config: str) -> None:
    installation.kill("api")
    (installation.home / "config.yaml").write_text(config)
    installation.start("api")
    wait_until(lambda: is_alive(installation), 60, lambda: installation.log("api"))


def is_alive(installation: Installation) -> bool:
    try:
        return httpx.get(f"{installation.url}/alive").is_success
    except httpx.TransportError:
        return False


def test_deletion_by_uid_spares_another_object_of_the_name(installation: Installation) -> None:
    api = open_cluster(str(installation.cluster.kubeconfig))
    metadata = {"name": f"a-{uuid4().hex[:6]}", "namespace": installation.name}
    made = api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    api.delete(CONFIG_MAP, installation.name, metadata["name"], uid=str(uuid4()))
    assert api.read(CONFIG_MAP, installation.name, metadata["name"])["metadata"]["uid"] == made["metadata"]["uid"]
    api.delete(CONFIG_MAP, installation.name, metadata["name"], uid=made["metadata"]["uid"])
    assert all(item["metadata"]["name"] != metadata["name"] for item in api.list(CONFIG_MAP, installation.name)[0])
