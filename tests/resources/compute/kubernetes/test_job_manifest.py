"""Objects applied for a job: accepted by the API server and complete as specified."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import ValidationError

from recipes.contracts.job import Distributed, Job, Program, Schedule, StoreAddress, Tracking
from resources.compute.kubernetes.job_manifest import out_of_reach, render, to_yaml
from resources.settings.scheduler import Scheduler
from tests.resources.compute.kubernetes.jobs import (
    BACKENDS,
    DISTRIBUTED,
    GPUS,
    JOBS,
    KUEUE,
    PLAIN,
    a_job,
    child,
    launched,
    of_kind,
    pod,
    program,
)
from tests.resources.compute.kubernetes.schemas import check

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("scheduler", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_api_server_takes_every_object(job: Job, scheduler: Scheduler) -> None:
    objects = render(job, scheduler)
    for item in objects:
        check(item)
        assert item["metadata"]["namespace"] == "hanzo-ml"
    assert list(yaml.safe_load_all(to_yaml(objects))) == objects


def test_schema_check_finds_unknown_keys_in_every_kind() -> None:
    broken = of_kind("JobSet", a_job())
    broken["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(ValidationError, match="restartPolice"):
        check(broken)
    for kind, backend, match in (
        ("JobSet", "kueue", "maxRestart"),
        ("PodGroup", "volcano", "maxRestart"),
        ("PodGroup", "coscheduling", "maxRestart"),
    ):
        broken = of_kind(kind, a_job(), BACKENDS[backend])
        broken["spec"]["maxRestart"] = 1
        with pytest.raises(jsonschema.ValidationError, match=match):
            check(broken)


def test_objects_are_rendered_in_the_order_of_application() -> None:
    assert [item["kind"] for item in render(DISTRIBUTED, KUEUE)] == ["ConfigMap", "Secret", "JobSet"]
    assert [item["kind"] for item in render(DISTRIBUTED, PLAIN)] == ["ConfigMap", "Secret", "Service", "Job"]
    assert [item["kind"] for item in render(a_job(), PLAIN)] == ["ConfigMap", "Secret", "Job"]
    for backend in ("coscheduling", "volcano"):
        assert [item["kind"] for item in render(DISTRIBUTED, BACKENDS[backend])] == [
            "ConfigMap",
            "Secret",
            "PodGroup",
            "JobSet",
        ]


def test_job_document_is_a_file_with_the_folders_and_addresses_of_a_pod() -> None:
    scheduler = Scheduler(tracking_uri="http://hanzo-ml.hanzo-ml.svc:8057")
    [text] = of_kind("ConfigMap", a_job(), scheduler)["data"].values()
    read = Job.model_validate_json(text)
    assert read.work_digest == a_job().work_digest
    assert (read.work_dir, read.cache_dir) == ("/work/job", "/work/cache")
    assert read.tracking == Tracking(uri="http://hanzo-ml.hanzo-ml.svc:8057", run_id="r")
    assert read.store.root == f"api+http://hanzo-ml.hanzo-ml.svc:8057/v1/jobs/{a_job().id}/programs/train/objects"
    assert read.store.buckets == a_job().store.buckets
    moved = {"work_dir", "cache_dir", "tracking", "store"}
    assert read.model_dump(exclude=moved) == a_job().model_dump(exclude=moved)
    assert launched(a_job())[1:] == ["-m", "recipes.train", "/job/job.json"]
    mounted = {mount["mountPath"]: mount["name"] for mount in program(a_job())["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(a_job())["volumes"]}
    assert volumes[mounted["/job"]]["configMap"]["name"] == of_kind("ConfigMap", a_job())["metadata"]["name"]
    assert "emptyDir" in volumes[mounted["/work"]] and "emptyDir" in volumes[mounted["/tmp"]]


@pytest.mark.requirement("Z9")
@pytest.mark.parametrize(("priority", "name"), [("low", "interactive"), ("medium", "batch"), ("high", "production")])
def test_job_set_names_queue_priority_and_duration_and_is_started_by_kueue(priority: Any, name: str) -> None:
    item = of_kind("JobSet", a_job(schedule=Schedule(priority=priority, max_duration="1.5h")))
    labels = item["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "hanzo-ml"
    assert labels["kueue.x-k8s.io/priority-class"] == name
    assert labels["kueue.x-k8s.io/max-exec-time-seconds"] == "5400"
    assert item["spec"]["suspend"] is True
    assert "activeDeadlineSeconds" not in child(a_job())


def test_interrupted_gangs_restart_uncounted_and_final_errors_end_the_job() -> None:
    spec, policy = child(DISTRIBUTED), of_kind("JobSet", DISTRIBUTED)["spec"]["failurePolicy"]
    assert spec["backoffLimit"] == 0 and pod(DISTRIBUTED)["restartPolicy"] == "Never"
    assert policy["maxRestarts"] > 10_000, "the controller counts: JobSet's own limit is never reached"
    actions: dict[str, list[Any]] = {}
    for rule in policy["rules"]:
        [pattern] = rule["onJobFailureMessagePatterns"]
        place = int(pattern.removeprefix("matching FailJob rule at index ").removesuffix("$"))
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
        failing = spec["podFailurePolicy"]["rules"][place]
        assert failing["action"] == "FailJob"
        actions.setdefault(rule["action"], []).append(failing.get("onPodConditions") or failing["onExitCodes"]["values"])
    assert actions == {
        "FailJobSet": [[1, 78]],
        "RestartJobSetAndIgnoreMaxRestarts": [[{"type": "DisruptionTarget", "status": "True"}], [143]],
    }, "75, and what was killed, restart the gang by JobSet's default"


def test_later_generation_has_new_objects_and_the_remaining_time() -> None:
    first, second = render(a_job(), KUEUE), render(a_job(), KUEUE, generation=2, used_seconds=3600.5)
    assert not {item["metadata"]["name"] for item in first} & {item["metadata"]["name"] for item in second}
    for one, other in zip(first, second, strict=True):
        check(other)
        job = "ml.hanzo.ai/job"
        assert one["metadata"]["labels"][job] == other["metadata"]["labels"][job]
        assert one["metadata"]["annotations"]["ml.hanzo.ai/generation"] == "1"
        assert other["metadata"]["annotations"]["ml.hanzo.ai/generation"] == "2"
    assert second[-1]["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == str(47 * 3600)
    spent = render(a_job(), KUEUE, generation=2, used_seconds=1e9)[-1]
    assert spent["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == "1"


def test_pods_that_share_a_preparation_know_their_numbers_and_restart_alone() -> None:
    job = JOBS["a preparation in three pods"]
    for scheduler in (KUEUE, PLAIN):
        spec = child(job, scheduler)
        assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
        (container,) = spec["template"]["spec"]["containers"]
        assert launched(job, scheduler, rank=2)[1:] == ["-m", "recipes.prepare", "/job/job.json", "2"]
        (number,) = [variable for variable in container["env"] if variable["name"] == "NODE_RANK"]
        assert "job-completion-index" in number["valueFrom"]["fieldRef"]["fieldPath"]
    assert [item["kind"] for item in render(job, PLAIN)] == ["ConfigMap", "Secret", "Job"]
    rules = child(job, PLAIN)["podFailurePolicy"]["rules"]
    assert child(job, PLAIN)["backoffLimit"] > 10_000
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Ignore"]


def test_gang_without_crds_is_not_restarted_in_part_but_a_single_pod_is() -> None:
    gang, single = child(DISTRIBUTED, PLAIN), child(a_job(), PLAIN)
    assert gang["backoffLimit"] == 0 and single["backoffLimit"] > 10_000
    assert [rule["action"] for rule in gang["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob", "FailJob"]
    assert [rule["action"] for rule in single["podFailurePolicy"]["rules"]] == ["FailJob", "Ignore", "Ignore"]
    assert gang["activeDeadlineSeconds"] == 48 * 3600
    assert "suspend" not in gang  # nothing would resume it


@pytest.mark.requirement("H3", "Z9")
def test_pod_groups_wait_for_every_node_and_restart_as_a_whole() -> None:
    for backend, scheduler_name in (("coscheduling", "scheduler-plugins-scheduler"), ("volcano", "volcano")):
        group, job_set = render(DISTRIBUTED, BACKENDS[backend])[-2:]
        name = group["metadata"]["name"]
        assert group["spec"]["minMember"] == 4
        assert render(JOBS["a preparation in three pods"], BACKENDS[backend])[-2]["spec"]["minMember"] == 1
        job = child(DISTRIBUTED, BACKENDS[backend])
        template = job["template"]
        places = template["metadata"]["labels"] | template["metadata"]["annotations"]
        key = {"coscheduling": "scheduling.x-k8s.io/pod-group", "volcano": "scheduling.k8s.io/group-name"}[backend]
        assert places[key] == name
        assert (template["spec"]["schedulerName"], template["spec"]["priorityClassName"]) == (scheduler_name, "batch")
        assert "suspend" not in job_set["spec"] and not [key for key in job_set["metadata"]["labels"] if "kueue" in key]
        assert job["activeDeadlineSeconds"] == 48 * 3600
        rules = {rule["name"]: rule for rule in job_set["spec"]["failurePolicy"]["rules"]}
        assert rules["timedOut"]["action"] == "FailJobSet"
    assert render(DISTRIBUTED, BACKENDS["volcano"])[-2]["spec"]["queue"] == "hanzo-ml"


CHANGES = {
    "id": {"id": "other"},
    "program": {"program": Program.EVALUATE},
    "parameters": {"parameters": {"steps": 2}},
    "hardware": {"hardware": GPUS},
    "nodes": {"distributed": Distributed(num_nodes=2)},
    "priority": {"schedule": Schedule(priority="high")},
    "duration": {"schedule": Schedule(max_duration="1h")},
}


@pytest.mark.parametrize("scheduler", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_manifest_is_deterministic_and_differs_between_jobs(change: dict[str, Any], scheduler: Scheduler) -> None:
    text = to_yaml(render(a_job(), scheduler))
    assert to_yaml(render(a_job(), scheduler)) == text
    assert to_yaml(render(a_job(**change), scheduler)) != text


def test_addresses_that_a_pod_cannot_reach_are_reported() -> None:
    assert out_of_reach(a_job(), KUEUE) == []
    here = a_job(
        store=StoreAddress(root="file:///objects", buckets={}), tracking=Tracking(uri="http://0.0.0.0:8057", run_id="r")
    )
    [tracking] = out_of_reach(here, KUEUE)
    assert "set scheduler.tracking_uri" in tracking
    assert out_of_reach(here, Scheduler(tracking_uri="http://ml:8057")) == [], "objects come through the API"


def test_job_manifest_loads_neither_dagster_nor_torch() -> None:
    code = (
        "import sys, resources.compute.kubernetes.job_manifest; print({'dagster', 'torch', 'kubernetes'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
