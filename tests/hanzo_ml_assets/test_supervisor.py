"""How a Dagster run handles the end of its program on a cluster.

The controller of the cluster is a test.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from hanzo_ml_assets.command import COMMAND_KEY, COMMAND_PARTITIONS
from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definitions import definitions
from hanzo_ml_assets.supervisor import describe_phase
from recipes.contracts.command_job import CommandJob
from recipes.contracts.exit_reason import ExitReason
from resources.compute.base import Observation, Phase
from resources.jobs.command import plan_command, submit_command
from resources.metadata.cluster_jobs import NOTHING, RUN, ClusterJobs, JobState
from resources.metadata.job_record import JobRecord
from tests.support.migrated_database import migrate


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    for name in [name for name in os.environ if name.startswith("HANZO_ML_") and not name.endswith("_PORT")]:
        monkeypatch.delenv(name)
    (tmp_path / "config.yaml").write_text("scheduler: {backend: kubernetes}")
    monkeypatch.setenv("HANZO_ML_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path / "home"))
    plane = ControlPlane()
    migrate(plane.database)
    yield plane
    plane.database.close()


def failed_job(plane: ControlPlane) -> JobRecord:
    """Create a command whose gang has failed, which no run has reported yet."""
    command = CommandJob.model_validate({"name": "mine", "command": ["python", "main.py"]})
    job = submit_command(plane.database, plane.store, command, "ann", "default")
    planned = plan_command(job, None, store=plane.settings.store, tracking_uri="http://api", cache_dir="/cache")
    plane.compute.submit(planned)
    rows = ClusterJobs(plane.database)
    rows.set_state(rows.get(job), JobState(Phase.FAILED, "exited with 3", ExitReason.PROGRAM_ERROR, attempt=1))
    return job


def wanted(plane: ControlPlane, job: JobRecord) -> str:
    return ClusterJobs(plane.database).get(job).wanted


def test_end_is_acknowledged_only_after_dagster_has_recorded_it(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor killed before it had recorded a failure lost it: the job was restarted."""
    job = failed_job(plane)
    recorded: list[bool] = []
    with dg.DagsterInstance.ephemeral() as instance:
        store_event = instance.handle_new_event

        def observe(event: dg.EventLogEntry, **options: object) -> None:
            if event.dagster_event_type is dg.DagsterEventType.STEP_FAILURE:
                recorded.append(wanted(plane, job) == RUN)
            store_event(event, **options)

        monkeypatch.setattr(instance, "handle_new_event", observe)
        instance.add_dynamic_partitions(COMMAND_PARTITIONS, [job.id])
        graph = definitions().resolve_implicit_global_asset_job_def()
        graph.execute_in_process(
            instance=instance, asset_selection=[dg.AssetKey(COMMAND_KEY)], partition_key=job.id, raise_on_error=False
        )
        (run,) = instance.get_runs()
    assert recorded == [True]
    assert wanted(plane, job) == NOTHING
    assert plane.jobs.read(job.id).status == "failed"
    assert run.tags["hanzo_ml/command"] == job.id


@pytest.mark.parametrize(
    ("seen", "phrase"),
    [
        (Observation(Phase.PENDING, 0, "quota: 8 more needed"), "is queued: quota: 8 more needed"),
        (Observation(Phase.RUNNING, 1), "is running"),
        (Observation(Phase.RESTARTING, 2, "node-1 was lost"), "restarts after attempt 2: node-1 was lost"),
    ],
)
def test_phases_read_as_sentences(seen: Observation, phrase: str) -> None:
    assert describe_phase(seen) == phrase
