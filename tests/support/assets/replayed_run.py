"""A finished run to replay, with server and control plane."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.dry_run import training as dry_run
from hanzo_ml_assets.training import complete_training
from hanzo_ml_assets.training_plan import make_training_plan, training_job
from resources.compute.base import Follower
from resources.ingest.version_creation import create_version
from resources.jobs.sandbox import SANDBOX
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from tests.recipes.preparation.preparation_workspace import questions
from tests.recipes.training.tracked_runs import install
from tests.support.server_process import ServerProcess

POISONED = """
import math
import time
from itertools import islice

import torch

from recipes.training.objectives.objective import Loss
from recipes.training.objectives.sft import Sft
from recipes.training.data.sample_order import SampleOrder

class Poisoned(Sft):
    "The loss of one row, the first of step 13, is not a number. Takes so long that there is time to be killed."

    bad = None

    def rows(self, split, *given):
        rows = super().rows(split, *given)
        if self.bad is None:  # the split to train on is the first
            ids = list(islice(SampleOrder(len(rows), self.recipe.seed).ids(), 13 * self.recipe.samples_per_step))
            self.bad = rows[ids[-self.recipe.samples_per_step]]["input_ids"]
        return rows

    def loss(self, model, batch):
        time.sleep(0.1)
        if model.training and any(torch.equal(row, self.bad) for row in batch["input_ids"]):
            return Loss(next(weight for weight in model.parameters() if weight.requires_grad).sum() * math.nan)
        return None
"""

"""An objective in a separately installed package."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    install("poisoned", POISONED, tmp_path, monkeypatch)
    (tmp_path / "home").mkdir()
    process = ServerProcess(tmp_path / "home")
    for name, value in process.environment.items():
        if name.startswith("HANZO_ML_"):
            monkeypatch.setenv(name, value)
    with process:
        yield process


@pytest.fixture
def control_plane(server: ServerProcess) -> Iterator[ControlPlane]:
    opened = ControlPlane()
    yield opened
    opened.database.close()


@pytest.fixture
def dataset(control_plane: ControlPlane, tmp_path: Path) -> str:
    store, rows = control_plane.store, [json.dumps(row) + "\n" for row in questions(300, seed=1)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    version, _ = create_version(
        control_plane.database,
        store,
        name="doors",
        path=tmp_path / "data.jsonl",
        format="jsonl",
        user="u",
        organization=DEFAULT_ORGANIZATION,
    )
    splits = {}
    for part, share in (("train", rows[:-20]), ("validation", rows[-20:-10]), ("test", rows[-10:])):
        folder = tmp_path / part
        folder.mkdir()
        (folder / "records.jsonl").write_text("".join(share))
        splits[part] = {"artifact": store.publish(folder, f"{version.storage_path}{part}", part).model_dump()}
    with control_plane.database.write() as connection:
        control_plane.datasets.set_splits(connection, version, splits)
    return str(version.reference)


def work_off(run_id: str, control_plane: ControlPlane, on_line: Callable[[str, Path], None]) -> None:
    control_plane.jobs.start(run_id)
    plan = make_training_plan(dry_run.load_definition(SANDBOX), run_id, control_plane)
    job = training_job(plan, control_plane)
    follower = Follower(
        line=lambda line: on_line(line, control_plane.settings.home / "jobs" / job.id / "train"), phase=lambda seen: None
    )
    complete_training(plan, job, control_plane.compute.run(job, follower), control_plane)
