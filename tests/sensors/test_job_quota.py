"""Jobs start within their organization's quota; the others queue and show the reason."""

from typing import Any

import dagster as dg
import pytest

from recipes.contracts.command_job import CommandJob
from resources.jobs.command import submit_command
from sensors.start_submitted_jobs import start_submitted_jobs
from tests.support.sensors.job_quota import set_quotas
from tests.support.sensors.sensor_harness import SensorHarness, harness, keys, repository

__all__ = ["harness", "repository"]  # fixtures

QUOTAS = """
scheduler:
  devices: []
  quotas:
    community: {max_gpus: 16, max_concurrent_jobs: 2, priority: low, preemptible: true}
    default: {max_gpus: 1}
"""


@pytest.fixture
def limited(harness: SensorHarness) -> SensorHarness:
    set_quotas(harness, QUOTAS)
    return harness


def submit(harness: SensorHarness, name: str, organization: str = "community", gpus: int = 0, **schedule: Any) -> str:
    asked = {"name": name, "command": ["python", "train.py"], "resources": {"gpus": gpus}, "schedule": schedule}
    job = CommandJob.model_validate(asked)
    return submit_command(harness.plane.database, harness.plane.store, job, "ann", organization).id


def started(harness: SensorHarness) -> set[str]:
    """Return the jobs that a tick starts, and create their runs."""
    before = {run.tags["dagster/partition"] for run in harness.instance.get_runs()}
    new = {str(request.partition_key) for request in harness.tick(start_submitted_jobs)} - before
    for job in new:
        tags = {"dagster/partition": job, "dagster/run_key": job}
        harness.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", status=dg.DagsterRunStatus.STARTING, tags=tags))
    return new


def reason(harness: SensorHarness, job: str) -> str:
    return harness.plane.jobs.read(job).reason


@pytest.mark.requirement("J2", "J11", "Z33")
def test_jobs_beyond_the_quota_wait_and_start_when_one_ends(limited: SensorHarness) -> None:
    first, second, third, fourth = (submit(limited, str(number)) for number in range(4))
    assert started(limited) == {first, second}
    assert reason(limited, third) == "waits for its organization's quota: 2 of 2 jobs run"
    assert reason(limited, fourth) == f"waits for its organization's quota, behind job {third}"
    assert started(limited) == set()  # their runs have not begun: they are still queued, and count against the quota
    limited.plane.jobs.start(first)
    limited.plane.jobs.start(second)
    assert started(limited) == set()
    limited.complete(first)
    for run in limited.instance.get_runs(dg.RunsFilter(tags={"dagster/partition": first})):
        limited.instance.delete_run(run.run_id)
    assert started(limited) == {third}


@pytest.mark.requirement("J10")
def test_waiting_large_job_is_overtaken_only_by_higher_priority(limited: SensorHarness) -> None:
    small = submit(limited, "small", gpus=4, priority="low")
    assert started(limited) == {small}
    large = submit(limited, "large", gpus=16, priority="low")
    other = submit(limited, "other", gpus=4, priority="low")
    assert started(limited) == set()
    assert reason(limited, large) == "waits for its organization's quota: 4 of 16 GPUs are taken, and it asks for 16"
    urgent = submit(limited, "urgent", gpus=4, priority="medium")
    assert started(limited) == {urgent}
    assert limited.plane.jobs.read(other).status == "queued"


@pytest.mark.requirement("J10", "X5")
def test_full_quota_does_not_delay_other_organizations(limited: SensorHarness) -> None:
    for number in range(3):
        submit(limited, str(number))
    others = {submit(limited, "other", "research", gpus=512), submit(limited, "default's", "default", gpus=1)}
    assert others < started(limited)


def test_recipe_gpus_count_toward_the_quota_and_an_oversized_job_fails(limited: SensorHarness) -> None:
    limited.dataset()
    limited.submit("lost", recipe="nowhere")  # it fails at its start, and blocks no other
    limited.submit("fits", parameters={"hardware": {"gpus": 1}})
    limited.submit("waits", parameters={"hardware": {"gpus": 1}})
    limited.submit("never", parameters={"hardware": {"gpus": 2}})
    assert started(limited) == {"lost", "fits"}
    assert reason(limited, "waits") == "waits for its organization's quota: 1 of 1 GPU are taken, and it asks for 1"
    never = limited.plane.jobs.read("never")
    assert never.status == "failed"
    assert never.reason.startswith("it asks for 2 GPUs, and the quota of your organization is 1: ask for fewer")


def test_resumed_job_is_counted_with_its_new_gpu_count(limited: SensorHarness) -> None:
    limited.dataset()
    on_one = {"hardware": {"gpus": 1}, "gradient_accumulation": 2}
    limited.submit("resumed", parameters=on_one, resumed={"times": 1, "gpus": 2})
    assert started(limited) == set()
    assert limited.plane.jobs.read("resumed").status == "failed"


def test_job_requesting_no_gpu_counts_as_one_on_a_gpu_machine(limited: SensorHarness) -> None:
    """It gets one: an organization limited to one GPU had two."""
    set_quotas(limited, QUOTAS.replace("devices: []", "devices: ['0', '1']"))
    first, second = (submit(limited, name, "default") for name in ("first", "second"))
    assert started(limited) == {first}
    assert reason(limited, second) == "waits for its organization's quota: 1 of 1 GPU are taken, and it asks for 1"


def test_started_job_survives_a_lowered_quota(limited: SensorHarness) -> None:
    set_quotas(limited, QUOTAS.replace("default: {max_gpus: 1}", "default: {max_gpus: 2}"))
    job = submit(limited, "two", "default", gpus=2)
    assert started(limited) == {job}
    set_quotas(limited, QUOTAS)
    started(limited)
    assert limited.plane.jobs.read(job).status == "queued"


def test_all_jobs_start_without_quotas(harness: SensorHarness) -> None:
    jobs = {submit(harness, str(number), gpus=512) for number in range(5)}
    requests = harness.tick(start_submitted_jobs)
    assert {request.run_key for request in requests} == jobs and keys(requests[0]) == ["jobs/command"]
