"""Losses are restored from the store after a database restore.

The backup is from before the run had ended.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.storage.base_model_folder import hash_model_folder
from tests.recipes.tiny_model import make_tiny_model
from tests.support.assets.replayed_run import control_plane, dataset, server, work_off
from tests.support.server_process import ServerProcess

__all__ = ["control_plane", "dataset", "server"]
STEPS = 8


def losses(server: ServerProcess, run: str) -> dict[int, float]:
    """Read losses as MLflow's client does."""
    asked = {"run_id": run, "metric_key": "train/loss"}
    answer = httpx.get(f"{server.url}/api/2.0/mlflow/metrics/get-history", params=asked, timeout=60)
    return {point["step"]: point["value"] for point in answer.json()["metrics"]}


@pytest.mark.slow
def test_losses_of_a_run_ended_after_the_backup_are_restored(
    server: ServerProcess, control_plane: ControlPlane, dataset: str, tmp_path: Path
) -> None:
    model, backup = make_tiny_model(tmp_path / "model"), tmp_path / "backup.db"
    parameters: dict[str, Any] = {
        "base_model": {"uri": model.as_uri(), "sha256": hash_model_folder(model)},
        "base_dtype": "float32",
        "batch_size": 2,
        "gradient_accumulation": 1,
        "sequence_length": 64,
        "max_steps": STEPS,
        "eval_steps": None,
    }
    body = {"name": "lost", "dataset": dataset, "parameters": parameters}
    run = str(httpx.post(f"{server.url}/v1/jobs", json=body, timeout=60).json()["id"])
    file = str(control_plane.database.engine.url.database)

    def keep_a_backup(line: str, work: Path) -> None:
        """Simulate a backup at step 3: training is faster than copying the database."""
        if f"step 3/{STEPS} loss" in line and not backup.exists():
            with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(backup)) as target:
                source.backup(target)
                target.execute("DELETE FROM metrics WHERE step > 3")
                target.commit()

    work_off(run, control_plane, keep_a_backup)
    before = losses(server, run)
    assert list(before) == list(range(1, STEPS + 1))

    server.stop()
    control_plane.database.close()
    with closing(sqlite3.connect(backup)) as source, closing(sqlite3.connect(file)) as target:
        source.backup(target)
    server.start()
    assert list(losses(server, run)) in ([1, 2, 3], [1, 2], [1], [])  # what the program had sent by then
    assert control_plane.jobs.read(run).status == "running"
    work_off(run, control_plane, lambda line, work: None)  # as a sensor requests it: the result is in the store
    assert losses(server, run) == before
