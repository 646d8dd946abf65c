"""Interrupted run workers: whether their job ends too, and which modules they load."""

import subprocess
import sys

import dagster as dg
import pytest

from hanzo_ml_assets.supervisor import is_program_cancelled, program_tags
from recipes.contracts.job import Program
from resources.compute.base import JobRef
from resources.installation import SOURCE

LOADED = """
import sys
import dagster._cli.api, resources.orchestration.postgres_storage
from dagster_aws.s3 import S3ComputeLogManager
from hanzo_ml_assets.definitions import definitions
from resources.compute.base import Compute
S3ComputeLogManager(bucket="logs", endpoint_url="http://127.0.0.1:9")
definitions().get_repository_def().get_all_jobs()
heavy = {"torch", "transformers", "kubernetes", "dagster_k8s", "pyarrow", "polars", "scipy", "optuna", "pandas"}
print(*sorted(heavy & set(sys.modules)))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
JOB = JobRef("evaluate-1", Program.EVALUATE)
MEMORY_KB = 250_000
"""The memory limit of a run pod (`RunPods.memory`)."""


@pytest.mark.parametrize(
    ("status", "cancelled"),
    [
        (dg.DagsterRunStatus.STARTED, False),
        (dg.DagsterRunStatus.FAILURE, False),
        (dg.DagsterRunStatus.CANCELING, True),
        (dg.DagsterRunStatus.CANCELED, True),
    ],
)
def test_interrupted_worker_ends_its_job_only_while_its_run_is_cancelled(
    status: dg.DagsterRunStatus, cancelled: bool
) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.add_run(dg.DagsterRun(job_name="job", status=status))
        assert is_program_cancelled(instance, run.run_id, JOB) is cancelled


def test_interrupted_worker_leaves_its_job_running_where_the_status_cannot_be_read() -> None:
    instance = dg.DagsterInstance.ephemeral()
    run = instance.add_run(dg.DagsterRun(job_name="job", status=dg.DagsterRunStatus.CANCELING))
    instance.run_storage.dispose()
    assert not is_program_cancelled(instance, run.run_id, JOB)


def test_cancelled_worker_leaves_a_program_running_that_another_run_follows() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.add_run(dg.DagsterRun(job_name="job", status=dg.DagsterRunStatus.CANCELING))
        other = instance.add_run(dg.DagsterRun(job_name="job", status=dg.DagsterRunStatus.STARTED))
        for each in (run, other):
            instance.add_run_tags(each.run_id, program_tags(JOB))
        assert not is_program_cancelled(instance, run.run_id, JOB)
        instance.report_run_failed(other)
        assert is_program_cancelled(instance, run.run_id, JOB)


def test_run_worker_of_a_cluster_fits_its_pod_and_loads_no_library_of_training_or_data() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADED],
        cwd=SOURCE,
        env={"PYTHONPATH": str(SOURCE), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    heavy, peak_kb = done.stdout.splitlines()[-2:]
    assert heavy == "" and int(peak_kb) < 0.8 * MEMORY_KB
