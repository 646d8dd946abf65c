"""Pods of a job: their number, resources and restrictions."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from recipes.contracts.job import BadConfiguration, Distributed, Hardware, Job
from recipes.contracts.pod_settings import Toleration, VolumeClaim
from recipes.contracts.recipe import Recipe
from resources.compute.kubernetes.job_manifest import render
from resources.settings.scheduler import Scheduler
from tests.resources.compute.kubernetes.jobs import BACKENDS, GPUS, JOBS, KUEUE, PLAIN, a_job, child, pod, program, variables
from tests.resources.compute.kubernetes.schemas import check


@pytest.mark.requirement("G4")
def test_single_node_job_is_one_pod_with_the_requested_resources() -> None:
    spec = child(a_job())
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 1, 1)
    wanted = {"cpu": "2", "memory": "4Gi"}
    assert program(a_job())["resources"] == {"requests": wanted, "limits": wanted}
    assert "nodeSelector" not in pod(a_job())
    eight = a_job(hardware=GPUS)
    assert program(eight)["resources"]["limits"] == {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert pod(eight)["nodeSelector"] == {"ml.hanzo.ai/gpu-type": "nvidia-a100-80gb"}


def test_pods_run_the_image_of_the_recipe_or_the_default_image() -> None:
    """Regression: the recipe's image was ignored in favour of the current default image."""
    recipe = Recipe.named("zen-7b-lora").changed({"image": "me/mine:3f2a9c1"})
    assert program(a_job(parameters={"recipe": recipe.model_dump(mode="json")}))["image"] == "me/mine:3f2a9c1"
    own = recipe.changed({"image": "me/other:1"})
    assert program(a_job(parameters={"recipe": own.model_dump(mode="json")}))["image"] == "me/other:1"
    none = Recipe.named("zen-7b-lora")
    assert program(a_job(parameters={"recipe": none.model_dump(mode="json")}))["image"] == KUEUE.default_image


def test_gang_has_one_pod_per_node_with_its_gpus() -> None:
    job = a_job(hardware=GPUS, distributed=Distributed(num_nodes=3, gpus_per_node=4))
    for scheduler in (KUEUE, PLAIN):
        assert (child(job, scheduler)["completions"], child(job, scheduler)["parallelism"]) == (3, 3)
        assert program(job, scheduler)["resources"]["limits"]["nvidia.com/gpu"] == "4"
    on_cpus = program(JOBS["two processes of one node"])
    assert "nvidia.com/gpu" not in on_cpus["resources"]["limits"]
    assert variables(JOBS["two processes of one node"])["HANZO_ML_PROCESSES"] == "2"


@pytest.mark.requirement("X6")
@pytest.mark.parametrize("scheduler", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_pods_keep_to_the_restricted_profile(job: Job, scheduler: Scheduler) -> None:
    spec, container = pod(job, scheduler), program(job, scheduler)
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] != 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert all(set(volume) <= {"name", "configMap", "emptyDir", "persistentVolumeClaim"} for volume in spec["volumes"])
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["terminationGracePeriodSeconds"] == job.schedule.grace_seconds


@pytest.mark.requirement("X3")
def test_job_secret_is_referenced_only_by_name() -> None:
    assert "envFrom" not in program(a_job(), KUEUE), "a pod holds no key of the object store"
    [named] = [item for item in render(a_job(), Scheduler(job_secret="mine")) if item["kind"] == "JobSet"]
    assert json.dumps(named).count('"secretRef": {"name": "mine"}') == 1


TCP = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}


@pytest.mark.requirement("H1")
@pytest.mark.parametrize("backend", ["kueue", "indexed_job"])
@pytest.mark.parametrize(
    ("rdma", "nodes", "resource", "variables", "devices"),
    [
        ("auto", 2, "rdma/hca", {}, "1"),
        ("auto", 2, None, {}, None),
        ("auto", 1, "rdma/hca", {}, None),
        ("enabled", 2, "rdma/hca", {"NCCL_NET": "IB"}, "1"),
        ("enabled", 1, None, {}, None),
        ("disabled", 2, "rdma/hca", TCP, None),
    ],
)
def test_rdma_devices_and_variables_follow_the_job_and_the_settings(
    rdma: Any, nodes: int, resource: str | None, variables: dict[str, str], devices: str | None, backend: Any
) -> None:
    """Regression: RDMA devices were never requested, so no pod had one."""
    job = a_job(hardware=GPUS, distributed=Distributed(rdma=rdma, num_nodes=nodes))
    objects = render(job, Scheduler(rdma_resource=resource, gang_backend=backend))
    container = objects[-1]["spec"]
    if backend == "kueue":
        container = container["replicatedJobs"][0]["template"]["spec"]
    [container] = container["template"]["spec"]["containers"]
    check(objects[-1])
    found = {item["name"]: item.get("value") for item in container["env"] if item["name"].startswith("NCCL")}
    assert found == variables
    for amounts in container["resources"].values():
        assert amounts.get("rdma/hca") == devices


def test_unavailable_rdma_is_refused() -> None:
    job = a_job(hardware=GPUS, distributed=Distributed(rdma="enabled", num_nodes=2))
    with pytest.raises(BadConfiguration, match=r"distributed\.rdma is enabled, but scheduler\.rdma_resource is not set"):
        render(job, KUEUE)
    assert render(a_job(distributed=Distributed(rdma="enabled", num_nodes=2, backend="gloo")), KUEUE)
    with pytest.raises(ValidationError, match="rdma_resource"):
        Scheduler(rdma_resource="hca")


def test_unknown_gpu_type_is_refused() -> None:
    with pytest.raises(BadConfiguration, match=r"unknown gpu_type 'abacus': use one of .* or add it to scheduler"):
        render(a_job(hardware=Hardware(gpus=1, gpu_type="abacus")), KUEUE)


@pytest.mark.parametrize("scheduler", BACKENDS.values(), ids=BACKENDS)
def test_every_pod_starts_the_launcher_and_gives_it_its_place_and_its_token(scheduler: Scheduler) -> None:
    job = JOBS["four nodes of eight GPUs"]
    assert program(job, scheduler)["command"] == ["python", "-m", "recipes.launcher", "/job/job.json"]
    found = variables(job, scheduler)
    fields = {name: found[name]["fieldRef"]["fieldPath"] for name in ("NODE_RANK", "POD_UID", "POD_NAME", "NODE_NAME")}
    assert "job-completion-index" in fields.pop("NODE_RANK")
    assert fields == {"POD_UID": "metadata.uid", "POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName"}
    assert (found["HANZO_ML_NODES"], found["HANZO_ML_PROCESSES"], found["HANZO_ML_GENERATION"]) == ("4", "8", "1")
    assert found["HANZO_ML_API"] == "http://ml.hanzo.svc:8057"
    assert found["MLFLOW_TRACKING_TOKEN"]["secretKeyRef"]["name"] == f"train-{job.id}-token"
    alone = variables(a_job(tracking=None), scheduler)
    assert (alone["HANZO_ML_RANK_0"], alone["HANZO_ML_NODES"], alone["HANZO_ML_PROCESSES"]) == ("127.0.0.1", "1", "0")
    assert {"HANZO_ML_API", "MLFLOW_TRACKING_TOKEN"} <= set(alone)


def test_pods_of_a_lost_node_leave_it_in_seconds_and_may_be_removed_by_force() -> None:
    for job in JOBS.values():
        lost = {each.get("key"): each.get("tolerationSeconds") for each in pod(job)["tolerations"]}
        assert lost["node.kubernetes.io/not-ready"] == lost["node.kubernetes.io/unreachable"] == 5
        assert ("nvidia.com/gpu" in lost) is bool(job.hardware.gpus)
        annotations = child(job)["template"]["metadata"]["annotations"]
        assert annotations["kueue.x-k8s.io/safe-to-forcefully-delete"] == "true"


EVERYTHING = JOBS["everything that a pod may have"]


@pytest.mark.parametrize("scheduler", BACKENDS.values(), ids=BACKENDS)
def test_secrets_volumes_and_nodes_of_a_job_reach_its_pods(scheduler: Scheduler) -> None:
    spec, container, found = pod(EVERYTHING, scheduler), program(EVERYTHING, scheduler), variables(EVERYTHING, scheduler)
    assert [each["secretRef"]["name"] for each in container["envFrom"]] == ["wandb", "hub-token"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {
        "topology.kubernetes.io/zone": "zone-a",
        "ml.hanzo.ai/gpu-type": "nvidia-a100-80gb",
    }
    assert {"key": "example.com/spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"} in spec["tolerations"]
    assert spec["terminationGracePeriodSeconds"] == 1200
    assert (found["NCCL_DEBUG"], found["HOME"]) == ("INFO", "/data/home")
    assert "fieldRef" in found["NODE_RANK"], "a variable of the gang is not the job's to change"
    assert len([each for each in container["env"] if each["name"] == "NODE_RANK"]) == 1


def test_a_claim_is_one_volume_however_often_it_is_mounted() -> None:
    volumes = [each for each in pod(EVERYTHING)["volumes"] if "persistentVolumeClaim" in each]
    claims = {each["persistentVolumeClaim"]["claimName"]: each for each in volumes}
    assert len(volumes) == 2 and set(claims) == {"datasets", "home.of-me"}
    assert (
        claims["datasets"]["persistentVolumeClaim"]["readOnly"]
        and not claims["home.of-me"]["persistentVolumeClaim"]["readOnly"]
    )
    mounts = {each["mountPath"]: each for each in program(EVERYTHING)["volumeMounts"]}
    assert mounts["/data"] == {"name": volumes[0]["name"], "mountPath": "/data", "readOnly": True}
    assert (mounts["/more"]["name"], mounts["/more"]["subPath"]) == (volumes[0]["name"], "more")
    assert mounts["/data/home"]["readOnly"] is False


def test_pod_settings_for_every_job_are_added_to_those_of_the_job() -> None:
    scheduler = Scheduler(
        image_pull_secrets=("common", "registry"),
        volumes=(VolumeClaim(claim="software", path="/opt/software"),),
        spot_tolerations=(Toleration(key="cloud/spot", operator="Exists"),),
    )
    spec = pod(EVERYTHING, scheduler)
    assert [each["name"] for each in spec["imagePullSecrets"]] == ["common", "registry"]
    assert "/opt/software" in {each["mountPath"] for each in program(EVERYTHING, scheduler)["volumeMounts"]}
    spot = {"key": "cloud/spot", "operator": "Exists"}
    assert spot in spec["tolerations"] and spot not in pod(a_job(), scheduler)["tolerations"]
    clash = Scheduler(volumes=(VolumeClaim(claim="other", path="/data"),))
    with pytest.raises(BadConfiguration, match=r"pod\.volumes: /data is mounted in every job already"):
        render(EVERYTHING, clash)
