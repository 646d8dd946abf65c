"""Faults that the controller must detect and report, each with a one-pod job."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Job
from resources.compute.base import Phase
from tests.cluster.cluster import Cluster
from tests.cluster.command_jobs import GREET, objects, submit
from tests.cluster.installation import Installation, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

GPUS = 2
"""The quota of the queue."""
COUNT = "import time\nfor second in range(15): print(second, flush=True); time.sleep(1)"
WAIT = "import time\nwhile True: time.sleep(1)"
NONE_OF_IT = "localhost/nothing-of-this-name:1"


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("installation")
    with Installation(cluster, "faults", folder, gpus=GPUS, scheduler={"start_limit": "15s"}) as installation:
        yield installation


def wait_until_cleared(installation: Installation, job: Job) -> None:
    wait_until(lambda: not objects(installation, job), 60, lambda: str(objects(installation, job)))


def test_command_succeeds_and_leaves_its_log_alone(installation: Installation) -> None:
    job = submit(installation, GREET)
    assert installation.wait_for(job, Phase.SUCCEEDED).reason is ExitReason.COMPLETED
    assert "hello\n" in installation.compute.read_log(job, 0).decode()
    wait_until_cleared(installation, job)


def test_id_of_two_hundred_characters_runs(installation: Installation) -> None:
    job = submit(installation, GREET, id="A_long-Name-" + uuid4().hex + "x" * 156)
    assert len(job.id) == 200
    installation.wait_for(job, Phase.SUCCEEDED)


def test_failed_command_says_with_which_code_it_ended(installation: Installation) -> None:
    job = submit(installation, "raise SystemExit(3)")
    ended = installation.wait_for(job, Phase.FAILED)
    assert ended.reason is ExitReason.PROGRAM_ERROR and "exited with 3" in ended.detail
    wait_until_cleared(installation, job)


def test_missing_image_fails_with_the_registry_message_and_frees_its_gpus(installation: Installation) -> None:
    job = submit(installation, GREET, gpus=GPUS, image=NONE_OF_IT)
    ended = installation.wait_for(job, Phase.FAILED)
    assert ended.reason is ExitReason.BAD_CONFIGURATION
    assert f"image {NONE_OF_IT} cannot be pulled" in ended.detail and "failed to" in ended.detail
    installation.wait_for(submit(installation, GREET, gpus=GPUS), Phase.SUCCEEDED)


def test_job_larger_than_the_quota_waits_with_the_kueue_message_until_cancelled(installation: Installation) -> None:
    job = submit(installation, GREET, gpus=GPUS + 1)
    wait_until(lambda: "insufficient quota" in installation.observe(job).detail, 60, lambda: installation.describe(job))
    row = installation.jobs.get(job)
    assert row.phase is Phase.PENDING and row.queue_position == 1 and "nvidia.com/gpu" in row.detail
    installation.compute.cancel(job)
    assert installation.wait_for(job, Phase.FAILED).reason is ExitReason.CANCELLED
    wait_until_cleared(installation, job)


@pytest.mark.requirement("G5")
def test_cancelled_job_ends_within_its_grace_period(installation: Installation) -> None:
    job = submit(installation, WAIT)
    installation.wait_for(job, Phase.RUNNING)
    installation.compute.cancel(job)
    assert installation.wait_for(job, Phase.FAILED, within=60).reason is ExitReason.CANCELLED
    wait_until_cleared(installation, job)


def test_job_set_deleted_by_hand_is_created_again(installation: Installation) -> None:
    job = submit(installation, COUNT)
    installation.wait_for(job, Phase.RUNNING)
    installation.cluster.kubectl(
        "delete", "jobset", installation.jobs.get(job).name, f"--namespace={installation.name}", "--wait=false"
    )
    ended = installation.wait_for(job, Phase.SUCCEEDED)
    assert ended.attempt == 2
    assert installation.jobs.get(job).generation == 1


def test_mount_that_fails_is_named_and_not_the_image(installation: Installation) -> None:
    volume = {"claim": "not-there", "path": "/data"}
    job = submit(installation, GREET, pod={"volumes": [volume]})
    wait_until(lambda: "not-there" in installation.observe(job).detail, 60, lambda: installation.describe(job))
    assert installation.observe(job).phase is Phase.STARTING
    installation.compute.cancel(job)
    installation.wait_for(job, Phase.FAILED)


@pytest.mark.requirement("G5")
def test_time_limit_ends_a_job_with_its_setting_named(installation: Installation) -> None:
    job = submit(installation, WAIT, schedule={"max_duration": "10s"})
    ended = installation.wait_for(job, Phase.FAILED)
    assert ended.reason is ExitReason.TIMED_OUT and "schedule.max_duration (10s)" in ended.detail
    wait_until_cleared(installation, job)


def test_restarted_controller_continues_every_job(installation: Installation) -> None:
    job = submit(installation, COUNT)
    installation.wait_for(job, Phase.RUNNING)
    installation.kill("controller")
    other = submit(installation, GREET)
    installation.start("controller")
    installation.wait_for(other, Phase.SUCCEEDED)
    assert installation.wait_for(job, Phase.SUCCEEDED).attempt == 1
    for each in (job, other):
        wait_until_cleared(installation, each)
