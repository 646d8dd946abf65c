"""Cluster queues and roles: valid objects with the quota and verbs that jobs need."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from recipes.contracts.job import BadConfiguration
from resources.compute.kubernetes.job_manifest import render
from resources.compute.kubernetes.setup.permissions import render_account, render_role, required_permissions
from resources.compute.kubernetes.setup.queues import render_queues
from resources.compute.kubernetes.setup.render import main, render_cluster
from resources.compute.kubernetes.setup.tenants import render_namespace
from resources.compute.kubernetes.submission import created_kinds
from resources.orchestration.launcher_role import launcher_objects
from resources.settings.scheduler import Capacity, Scheduler
from resources.settings.settings import Settings
from tests.resources.compute.kubernetes.jobs import BACKENDS, DISTRIBUTED
from tests.resources.compute.kubernetes.schemas import check

CAPACITY = {
    "nvidia-a100-80gb": Capacity(gpus=64, cpu=512, memory="4Ti"),
    "cpu": Capacity(cpu=32, memory="128Gi"),
}
KUEUE = Scheduler(capacity=CAPACITY, rdma_resource="rdma/hca")


def named(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


@pytest.mark.parametrize("backend", BACKENDS)
def test_api_server_accepts_all_that_a_cluster_needs(backend: str, tmp_path: Path) -> None:
    scheduler = Scheduler.model_validate({"gang_backend": backend, "capacity": CAPACITY})
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path)}).model_copy(update={"scheduler": scheduler})
    for item in render_cluster(settings):
        if (item["kind"], item["apiVersion"]) != ("Queue", "scheduling.volcano.sh/v1beta1"):
            check(item)


def test_quota_is_the_capacity_of_the_settings_by_type_of_node() -> None:
    [queue] = named(render_queues(KUEUE), "ClusterQueue").values()
    [group] = queue["spec"]["resourceGroups"]
    assert group["coveredResources"] == ["cpu", "memory", "nvidia.com/gpu", "rdma/hca"]
    quotas = {
        flavor["name"]: {each["name"]: each["nominalQuota"] for each in flavor["resources"]} for flavor in group["flavors"]
    }
    assert quotas == {
        "nvidia-a100-80gb": {"cpu": "512", "memory": "4Ti", "nvidia.com/gpu": "64", "rdma/hca": "64"},
        "cpu": {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": "0", "rdma/hca": "0"},
    }


def test_jobs_find_their_queue_flavor_and_priority_in_what_is_rendered() -> None:
    objects = render_queues(KUEUE)
    job_set = render(DISTRIBUTED, KUEUE)[-1]
    labels = job_set["metadata"]["labels"]
    queue = named(objects, "LocalQueue")[labels["kueue.x-k8s.io/queue-name"]]
    assert queue["metadata"]["namespace"] == job_set["metadata"]["namespace"]
    assert queue["spec"]["clusterQueue"] in named(objects, "ClusterQueue")
    assert labels["kueue.x-k8s.io/priority-class"] in named(objects, "WorkloadPriorityClass")
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    flavor = named(objects, "ResourceFlavor")["nvidia-a100-80gb"]["spec"]
    assert flavor["nodeLabels"].items() <= pod["nodeSelector"].items()
    [taint] = flavor["nodeTaints"]
    assert taint["key"] in {each.get("key") for each in pod["tolerations"]}
    covered = named(objects, "ClusterQueue")["hanzo-ml"]["spec"]["resourceGroups"][0]["coveredResources"]
    assert set(pod["containers"][0]["resources"]["requests"]) <= set(covered), "else Kueue would never admit it"


@pytest.mark.requirement("J3")
def test_only_more_urgent_jobs_preempt_and_only_without_room_in_another_flavor() -> None:
    [queue] = named(render_queues(KUEUE), "ClusterQueue").values()
    assert queue["spec"]["preemption"] == {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Never"}
    assert queue["spec"]["flavorFungibility"] == {"whenCanPreempt": "TryNextFlavor"}


@pytest.mark.requirement("J7")
def test_more_urgent_jobs_have_the_higher_class() -> None:
    for backend, kind in (
        ("kueue", "WorkloadPriorityClass"),
        ("volcano", "PriorityClass"),
        ("coscheduling", "PriorityClass"),
    ):
        scheduler = Scheduler.model_validate({"gang_backend": backend, "capacity": CAPACITY})
        values = {name: item["value"] for name, item in named(render_queues(scheduler), kind).items()}
        assert values["interactive"] < values["batch"] < values["production"]


def test_volcano_queue_has_the_whole_capacity() -> None:
    [queue] = named(render_queues(Scheduler(gang_backend="volcano", capacity=CAPACITY)), "Queue").values()
    memory = str(4 * 1024**4 + 128 * 1024**3)
    assert queue["spec"]["capability"] == {"cpu": "544", "memory": memory, "nvidia.com/gpu": "64"}


def test_capacity_is_required_and_checked() -> None:
    with pytest.raises(BadConfiguration, match=r"scheduler\.capacity is empty: set how much"):
        render_queues(Scheduler())
    for capacity, words in (
        ({"abacus": {"gpus": 1, "cpu": 1, "memory": "1Gi"}}, "'abacus' is not one of gpu_types"),
        ({"cpu": {"gpus": 1, "cpu": 1, "memory": "1Gi"}}, "remove its `gpus`"),
        ({"cpu": {"cpu": 1, "memory": "much"}}, "is not a quantity"),
    ):
        with pytest.raises(ValidationError, match=words):
            Scheduler.model_validate({"capacity": capacity})


@pytest.mark.parametrize("own_namespaces", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_roles_grant_what_the_controller_does_and_no_more(backend: str, own_namespaces: bool) -> None:
    scheduler = Scheduler.model_validate(
        {"gang_backend": backend, "capacity": CAPACITY, "namespace_per_organization": own_namespaces}
    )
    objects = [*render_account(scheduler, "hanzo"), *render_role(scheduler, "hanzo-ml", "hanzo")]
    rules = [rule for item in objects if item["kind"] in ("Role", "ClusterRole") for rule in item["rules"]]
    granted = {(rule["apiGroups"][0], rule["resources"][0], verb) for rule in rules for verb in rule["verbs"]}
    needed = {(each.group, each.resource, verb) for each in required_permissions(scheduler) for verb in each.verbs}
    assert granted == needed and not [grant for grant in granted if "*" in grant]
    for kind in created_kinds(scheduler):
        group = kind.api_version.rpartition("/")[0]
        assert {(group, kind.plural, verb) for verb in ("create", "get", "delete")} <= granted
    assert not {("", "secrets", verb) for verb in ("get", "list", "watch")} & granted, "tokens of jobs are never read"
    assert ("", "nodes", "list") in granted
    for binding in (item for item in objects if item["kind"].endswith("Binding")):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "hanzo-ml", "namespace": "hanzo"}]


def test_command_prints_every_object_or_the_missing_setting_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    config = tmp_path / "config.yaml"
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path))
    monkeypatch.setenv("HANZO_ML_CONFIG", str(config))
    config.write_text("scheduler: {capacity: {cpu: {cpu: 4, memory: 8Gi}}}\n")
    main()
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    settings = Settings.load()
    assert printed == [
        *render_account(settings.scheduler, "hanzo"),
        *render_namespace(settings),
        *launcher_objects(settings.dagster.run_pods),
        *render_queues(settings.scheduler),
    ]
    config.write_text("scheduler: {}\n")
    with pytest.raises(SystemExit, match=r"error: scheduler\.capacity is empty"):
        main()
