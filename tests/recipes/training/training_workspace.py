"""A tiny model, two splits and a store, on which training runs in this process."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes import train as program
from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.job import Hardware, Job, Program, Result, StoreAddress, Tracking
from recipes.contracts.recipe import Recipe
from recipes.contracts.recipe_references import PREFERENCE_OBJECTIVES
from recipes.contracts.recovery_log import RecoveryEvent
from recipes.contracts.results import TrainingFacts
from recipes.storage.artifact_store import Store
from recipes.storage.base_model_folder import hash_model_folder
from recipes.training.metrics.tracking import read_pending_metrics
from tests.recipes.preparation.preparation_workspace import BUCKETS, questions
from tests.recipes.tiny_model import make_tiny_model

CHECKPOINTS = "s3://hanzo-ml/checkpoints/{}"
NOBODY = "http://127.0.0.1:9"
"""An unreachable tracking server: metrics stay in the checkpoints."""


class Place:
    """A workspace whose `recipe` trains 8 steps of 4 rows, less than an epoch.

    Args:
        store: used in place of a new store below `folder`.
    """

    def __init__(self, folder: Path, store: Store | None = None) -> None:
        self.folder = folder
        self.store = store or Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))
        self.inputs = {
            "run": self.split("run", 1),
            "train": self.split("train", 60),
            "validation": self.split("validation", 8),
        }
        self.pairs = {
            "run": self.inputs["run"],
            "train": self.split("train-pairs", 60, pair_of),
            "validation": self.split("validation-pairs", 8, pair_of),
        }
        model = make_tiny_model(folder / "model")
        self.recipe = Recipe.named("smollm2-135m-lora").changed(
            {
                "base_model": {"uri": model.as_uri(), "sha256": hash_model_folder(model)},
                "base_dtype": "float32",
                "lora_rank": 4,
                "lora_dropout": 0.0,
                "learning_rate": 5e-3,
                "batch_size": 4,
                "gradient_accumulation": 1,
                "sequence_length": 64,
                "max_steps": 8,
                "eval_steps": 2,
                "hardware": {"cpu": 1},
                "checkpoint": {"interval": "1h", "interval_steps": 2, "keep_last": 3},
            }
        )

    def split(self, name: str, count: int, made_of: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Any:
        raw = self.folder / name
        raw.mkdir()
        rows = [made_of(row) for row in questions(count, seed=len(name))]
        (raw / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self.store.publish(raw, f"s3://hanzo-ml/datasets/d/1/{name}", name)

    def job(self, work: Path, changed: dict[str, Any], repeats: Sequence[RecoveryEvent] = ()) -> Job:
        recipe = self.recipe.changed(changed)
        return Job(
            id=work.name,
            program=Program.TRAIN,
            inputs=self.pairs if recipe.objective in PREFERENCE_OBJECTIVES else self.inputs,
            parameters={
                "recipe": recipe.model_dump(mode="json"),
                "repeats": [incident.model_dump(mode="json") for incident in repeats],
            },
            outputs={
                "checkpoints": CHECKPOINTS.format(work.name),
                recipe.trained_role: f"s3://hanzo-ml/runs/{work.name}/trained",
            },
            result_uri=f"s3://hanzo-ml/runs/{work.name}/train.json",
            store=self.store.address,
            work_dir=str(work),
            cache_dir=str(self.folder / "cache"),
            tracking=Tracking(uri=NOBODY, run_id=work.name),
            hardware=Hardware(cpu=1),
            checkpoint=recipe.checkpoint,
        )

    def train(self, work: Path, repeats: Sequence[RecoveryEvent] = (), **changed: Any) -> Result:
        result = self.run(self.job(work, changed, repeats), work)
        assert result is not None
        return result

    def run(self, job: Job, work: Path) -> Result | None:
        """Run the job; return None for a process that is not the leader."""
        work.mkdir(parents=True, exist_ok=True)
        with pytest.MonkeyPatch.context() as patched:
            for grace in ("METRICS_GRACE_SECONDS", "STOPPED_GRACE_SECONDS"):
                patched.setattr(program, grace, 0)
            return program.train(job, self.store, work)

    def checkpoints(self, work: Path) -> CheckpointManager:
        return CheckpointManager(work / "checkpoints", self.store, CHECKPOINTS.format(work.name), 3)


def saved(checkpoints: CheckpointManager, *steps: int, facts: dict[str, Any] | None = None) -> None:
    """Save checkpoints without anything to train on."""
    for step in steps:
        with checkpoints.save(step, facts) as folder:
            (folder / "weights").write_text(checkpoints.folder.name)
    checkpoints.wait()


def pending_in(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the pending metrics of a checkpoint: all of them, without a tracking server."""
    return [point.to_json() for point in read_pending_metrics(checkpoint)]


def pair_of(question: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": question["instruction"], "chosen": question["answer"], "rejected": "I do not know."}


def facts(result: Result) -> TrainingFacts:
    return TrainingFacts.model_validate(result.facts)


def weights(place: Place, result: Result) -> str:
    (file,) = (file for file in place.store.manifest(result.artifacts["adapter"]).files if file.path.endswith("safetensors"))
    return file.sha256


def stop_after(step: int) -> Any:
    """Return an `on_step_end` that acts as if SIGTERM had arrived in that step."""

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            self._signal_received = control.should_save = control.should_training_stop = True

    return on_step_end
