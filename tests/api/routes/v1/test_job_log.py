"""The log of a job comes from the compute backend that the settings name."""

from pathlib import Path

import pytest

from resources.compute.backends import open_backend
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


def test_log_of_another_program_under_the_same_id_is_another_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = register(monkeypatch, tmp_path / "backends")
    settings = migrated(tmp_path / "home", HANZO_ML_SCHEDULER_BACKEND="memory")
    assert type(open_backend(settings)).__name__ == "MemoryCompute"
    with answering(settings) as client:
        job = client.post("/v1/jobs", json={"name": "mine", "command": ["true"]}).json()["id"]
        logs[job, "train"] = b"of a training\n"
        assert client.get(f"/v1/jobs/{job}").json()["logs"] == []
