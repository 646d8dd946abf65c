"""The log of a job comes from the compute backend that the settings name."""

from pathlib import Path

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Job, Program
from resources.compute.backends import open_backend
from resources.compute.base import Phase
from resources.metadata.cluster_jobs import ClusterJobs, JobState
from resources.metadata.database import Database
from tests.api.conftest import answering, migrated
from tests.resources.compute.second_backend import register


def test_log_is_read_from_the_configured_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = register(monkeypatch, tmp_path / "backends")
    settings = migrated(tmp_path / "home", HANZO_ML_SCHEDULER_BACKEND="memory")
    with answering(settings) as client:
        job = client.post("/v1/jobs", json={"name": "mine", "command": ["true"]}).json()["id"]
        local = settings.home / "jobs" / job / "command"
        local.mkdir(parents=True)
        (local / "log.txt").write_text("on this machine\n")
        assert client.get(f"/v1/jobs/{job}").json()["logs"] == []
        logs[job, "command"] = b"epoch 1\nepoch 2\nhalf a li"
        assert client.get(f"/v1/jobs/{job}").json()["logs"] == ["epoch 1", "epoch 2", "half a li"]
        streamed = client.get(f"/v1/jobs/{job}/logs", params={"follow": False}).text
    assert streamed == "data: epoch 1\n\ndata: epoch 2\n\ndata: half a li\n\nevent: end\ndata: queued\n\n"


def test_log_of_another_program_under_the_same_id_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = register(monkeypatch, tmp_path / "backends")
    settings = migrated(tmp_path / "home", HANZO_ML_SCHEDULER_BACKEND="memory")
    assert type(open_backend(settings)).__name__ == "MemoryCompute"
    with answering(settings) as client:
        job = client.post("/v1/jobs", json={"name": "mine", "command": ["true"]}).json()["id"]
        logs[job, "train"] = b"of a training\n"
        assert client.get(f"/v1/jobs/{job}").json()["logs"] == []


def test_job_on_a_cluster_shows_its_phase_and_its_place_in_the_queue(tmp_path: Path) -> None:
    settings = migrated(tmp_path / "home")
    with answering(settings) as client:
        job = client.post("/v1/jobs", json={"name": "mine", "command": ["true"]}).json()["id"]
        assert "cluster" not in client.get(f"/v1/jobs/{job}").json()
        rows = ClusterJobs(Database(settings.database_url))
        document = Job(
            id=job,
            program=Program.COMMAND,
            result_uri=f"s3://hanzo-ml/runs/{job}/command.json",
            store=settings.store,
            cache_dir="/work/cache",
        )
        row = rows.submit(document, "hanzo-ml", "command-mine")
        rows.set_state(row, JobState(Phase.PENDING, "quota: 16 more GPUs needed", queue_position=3))
        (state,) = client.get(f"/v1/jobs/{job}").json()["cluster"]
        assert (state["program"], state["phase"], state["queue_position"]) == ("command", "queued", 3)
        assert state["detail"] == "quota: 16 more GPUs needed"
        rows.set_state(row, JobState(Phase.FAILED, "node-2 was lost", ExitReason.NODE_LOST, attempt=4, admitted_at=1))
        (state,) = client.get(f"/v1/jobs/{job}").json()["cluster"]
        assert (state["phase"], state["attempt"], state["reason"]) == ("failed", 4, "node_lost")
