"""Rendered objects on a real API server: accepted, queued by Kueue, restarted by exit code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Distributed, Hardware, Job, Schedule
from resources.compute.kubernetes.cluster import Cluster as Api
from resources.compute.kubernetes.cluster import InvalidObject, open_cluster
from resources.compute.kubernetes.job_manifest import render
from resources.compute.kubernetes.setup.check import check_cluster
from resources.compute.kubernetes.setup.queues import render_queues
from resources.compute.kubernetes.setup.render import render_cluster
from resources.settings.scheduler import CPU_FLAVOR, Capacity, Egress, PriorityClasses, Scheduler
from resources.settings.settings import Settings
from tests.cluster.cluster import Cluster
from tests.cluster.images import JOB_IMAGE
from tests.resources.compute.kubernetes.jobs import JOBS, a_job

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

NAME = "rendered"
GPU_TYPE = "rendered-gpu"
SECONDS = 120.0


@pytest.fixture(scope="module")
def scheduler(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    """Return the settings of a namespace and a queue of two GPUs, which are applied."""
    found = Scheduler(
        namespace=NAME,
        queue=NAME,
        cluster_queue=NAME,
        kubeconfig=str(cluster.kubeconfig),
        default_image=JOB_IMAGE,
        gpu_types=(GPU_TYPE, "nvidia-a100-80gb"),
        gpu_type_label="rendered/gpu-type",
        priority_classes=PriorityClasses(low=f"{NAME}-low", medium=f"{NAME}-medium", high=f"{NAME}-high"),
        tracking_uri=f"http://{cluster.address}:8057",
        egress=(Egress(cidr=f"{cluster.address}/32", ports=(53,)),),
        capacity={GPU_TYPE: Capacity(gpus=2, cpu=8, memory="8Gi"), "cpu": Capacity(cpu=8, memory="8Gi")},
    )
    cluster.kubectl("label", "nodes", "--all", "--overwrite", f"{found.gpu_type_label}={GPU_TYPE}")
    queues = render_queues(found)
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path_factory.mktemp("rendered"))})
    cluster.apply(*render_cluster(settings.model_copy(update={"scheduler": found})))
    yield found
    cluster.kubectl("delete", "namespace", NAME, "--timeout=120s")
    for item in reversed(queues):
        # The flavor of nodes without GPUs has the same name in every queue.
        if "namespace" not in item["metadata"] and item["metadata"]["name"] != CPU_FLAVOR:
            cluster.kubectl("delete", item["kind"], item["metadata"]["name"], "--wait=false")


@pytest.fixture
def api(scheduler: Scheduler) -> Api:
    return open_cluster(scheduler.kubeconfig)


@pytest.mark.parametrize("backend", ["kueue", "indexed_job"])
@pytest.mark.parametrize("name", JOBS)
def test_api_server_accepts_objects_children_and_pods(api: Api, scheduler: Scheduler, name: str, backend: Any) -> None:
    """With all webhooks and the restricted Pod Security profile; includes JobSet's children and their pods."""
    objects = render(JOBS[name], scheduler.model_copy(update={"gang_backend": backend}), generation=2)
    for item in objects:
        api.create(item, dry_run=True)
    spec = objects[-1]["spec"]
    job = spec["replicatedJobs"][0]["template"] if backend == "kueue" else {"metadata": {}, "spec": spec}
    pod = job["spec"]["template"]
    for kind, version, template in (("Job", "batch/v1", job), ("Pod", "v1", pod)):
        metadata = {**template["metadata"], "name": "child", "namespace": NAME}
        api.create({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": template["spec"]}, dry_run=True)


def test_check_finds_nothing_missing_where_everything_rendered_is_applied(
    cluster: Cluster, api: Api, scheduler: Scheduler
) -> None:
    _, findings = check_cluster(api, scheduler)
    assert [finding for finding in findings if finding.problem] == []
    cluster.kubectl("delete", "workloadpriorityclass", f"{NAME}-low")
    larger = {**scheduler.capacity, GPU_TYPE: Capacity(gpus=64, cpu=8, memory="8Gi")}
    _, findings = check_cluster(api, scheduler.model_copy(update={"capacity": larger}))
    problems = {finding.subject: finding.problem for finding in findings if finding.problem}
    assert problems.pop(f"WorkloadPriorityClass {NAME}-low") == "does not exist"
    assert "expected 64" in problems.pop(f"ClusterQueue {NAME}")
    assert "nodes offer 24" in problems.pop(f"GPUs {GPU_TYPE}")
    assert problems == {}
    cluster.apply(*render_queues(scheduler))


@pytest.mark.requirement("U4")
def test_service_account_may_do_what_its_roles_grant_and_no_more(cluster: Cluster, scheduler: Scheduler) -> None:
    account = "--as=system:serviceaccount:hanzo:hanzo-ml"

    def may(verb: str, resource: str, namespace: str = NAME) -> bool:
        done = cluster._kubectl("auth", "can-i", verb, resource, account, f"--namespace={namespace}")
        return done.stdout.strip() == "yes"

    assert may("create", "jobsets.jobset.x-k8s.io") and may("list", "nodes") and may("watch", "pods", "default")
    assert (
        not may("get", "secrets") and not may("create", "pods") and not may("create", "jobsets.jobset.x-k8s.io", "default")
    )


class Gang:
    """A job's objects, whose pods run a shell command instead of the launcher."""

    def __init__(self, api: Api, scheduler: Scheduler, job: Job, script: str) -> None:
        self._api = api
        objects = render(job, scheduler)
        self.name = objects[-1]["metadata"]["name"]
        template = objects[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        template["spec"]["containers"][0]["command"] = ["sh", "-c", script]
        for item in objects:
            api.create(item)

    @property
    def job_set(self) -> dict[str, Any]:
        return self._api.request("GET", f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAME}/jobsets/{self.name}")

    @property
    def restarts(self) -> tuple[int, int]:
        """All restarts, and those that count towards the maximum."""
        status = self.job_set.get("status", {})
        return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)

    def conditions(self) -> dict[str, str]:
        """Return the conditions that hold for JobSet and Workload, with their messages."""
        items = self._api.request("GET", f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAME}/workloads")["items"]
        uid = self.job_set["metadata"]["uid"]
        own = [item for item in items if item["metadata"]["ownerReferences"][0]["uid"] == uid]
        found = [each for item in (self.job_set, *own) for each in item.get("status", {}).get("conditions") or ()]
        return {f"{each['type']}={each['status']}": each.get("message", "") for each in found}

    def wait_for(self, condition: str) -> str:
        end = time.monotonic() + SECONDS
        while condition not in (found := self.conditions()):
            assert time.monotonic() < end, (condition, found)
            time.sleep(0.5)
        return found[condition]


def small(id: str, *, nodes: int = 2, gpus: int = 0, priority: Any = "medium") -> Job:
    hardware = Hardware(gpus=gpus, gpu_type=GPU_TYPE if gpus else None, cpu=1, memory="64Mi")
    shape = Distributed(num_nodes=nodes, gpus_per_node=gpus or 1, backend="nccl" if gpus else "gloo")
    schedule = Schedule(priority=priority, grace_period="20s", max_duration="10m")
    return a_job(id=id, hardware=hardware, distributed=shape, schedule=schedule)


@pytest.mark.parametrize("code", [1, 78])
def test_final_exit_code_ends_the_gang_without_a_restart(api: Api, scheduler: Scheduler, code: int) -> None:
    gang = Gang(api, scheduler, small(f"final-{code}"), f"[ $NODE_RANK = 1 ] && exit {code}; sleep 600")
    assert "FailJobSet" in gang.wait_for("Failed=True")
    assert gang.restarts == (0, 0)


@pytest.mark.parametrize(("code", "counts"), [(75, True), (143, False)])
def test_other_exit_codes_restart_the_whole_gang(
    api: Api, scheduler: Scheduler, cluster: Cluster, code: int, counts: bool
) -> None:
    gang = Gang(api, scheduler, small(f"again-{code}"), f"[ $NODE_RANK = 1 ] && exit {code}; sleep 600")
    end = time.monotonic() + SECONDS
    while gang.restarts[0] < 2:
        assert time.monotonic() < end, gang.conditions()
        time.sleep(0.5)
    assert gang.restarts[1] == (gang.restarts[0] if counts else 0)
    cluster.kubectl("delete", "jobset", f"--namespace={NAME}", gang.name)


def test_gang_waits_whole_and_is_preempted_and_resumed_whole(api: Api, scheduler: Scheduler, cluster: Cluster) -> None:
    save = 'trap "sleep 1; exit 143" TERM; sleep 600 & wait $!'
    first = Gang(api, scheduler, small("first", gpus=1), save)
    first.wait_for("PodsReady=True")
    second = Gang(api, scheduler, small("second", gpus=1), save)
    assert f"insufficient unused quota for nvidia.com/gpu in flavor {GPU_TYPE}" in second.wait_for("QuotaReserved=False")
    urgent = Gang(api, scheduler, small("urgent", nodes=1, gpus=1, priority="high"), "sleep 3")
    assert "Preempted to accommodate a workload" in first.wait_for("Evicted=True")
    assert first.job_set["spec"]["suspend"] is True
    urgent.wait_for("Completed=True")
    first.wait_for("PodsReady=True")
    # Exit 143 may be seen before the suspension that caused it: JobSet then restarts the gang, without counting it.
    assert first.restarts[1] == 0, "a preemption costs no counted restart"
    assert second.job_set["spec"]["suspend"] is True
    for gang in (first, second):
        cluster.kubectl("delete", "jobset", f"--namespace={NAME}", gang.name)


def test_invalid_object_is_rejected_with_the_reason(api: Api, scheduler: Scheduler) -> None:
    [*_, job_set] = render(JOBS["one node"], scheduler)
    job_set["spec"]["failurePolicy"]["rules"][0]["action"] = "Explode"
    with pytest.raises(InvalidObject, match='Unsupported value: "Explode"'):
        api.create(job_set, dry_run=True)


@pytest.mark.requirement("A6")
def test_dry_run_manifest_can_be_applied_with_kubectl(cluster: Cluster) -> None:
    exact = Path(__file__).parents[1] / "hanzo_ml_assets" / "specification_job.yaml"
    document = exact.read_text().replace("namespace: hanzo-ml", f"namespace: {NAME}")
    assert "jobset.jobset.x-k8s.io/" in cluster.kubectl("apply", "--dry-run=server", "--filename=-", document=document)
