"""Train, evaluate and convert a tiny model in this process, on few records."""

import json
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes import train as program
from recipes.contracts.job import CheckpointPolicy, Hardware, Job, Program, Result, StoreAddress, Tracking
from recipes.contracts.recipe import Recipe
from recipes.convert import convert
from recipes.evaluate import evaluate
from recipes.export import base_model
from recipes.storage.artifact_store import Store
from recipes.storage.base_model_folder import hash_model_folder
from recipes.storage.manifest import Artifact
from tests.recipes.tiny_model import make_tiny_adapter, make_tiny_model

COLOURS = ("red", "green", "blue", "grey", "black")
QUESTIONS: list[dict[str, Any]] = [
    {"instruction": f"What colour has door {number}?", "answer": f"Door {number} is {COLOURS[number % 5]}."}
    for number in range(40)
]
SMALL: dict[str, Any] = {
    "name": "tiny",
    "description": "a test",
    "learning_rate": 5e-3,
    "batch_size": 2,
    "gradient_accumulation": 2,
    "max_steps": 6,
    "sequence_length": 64,
}
LORA: dict[str, Any] = {
    "method": "lora",
    "base_dtype": "float32",
    "lora_rank": 4,
    "lora_dropout": 0.1,
    "lora_target_modules": ["q_proj", "v_proj", "down_proj"],
}
QLORA: dict[str, Any] = LORA | {
    "method": "qlora",
    "base_dtype": "nf4",
    "compute_dtype": "float32",
    "double_quant": True,
}
FULL: dict[str, Any] = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}


class TinyTraining:
    """Workspace in one folder; `train` resumes the run when a name is reused."""

    def __init__(self, folder: Path, rows: Sequence[Mapping[str, Any]] = QUESTIONS) -> None:
        self.folder = folder
        buckets = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
        self.store = Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=buckets))
        self.model = make_tiny_model(folder / "model")
        self.run = self.publish("run", [{"run": 1}])
        self.splits = self.split("records", rows)

    def publish(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Artifact:
        raw = self.folder / "raw" / name
        shutil.rmtree(raw, ignore_errors=True)
        raw.mkdir(parents=True)
        (raw / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self.store.publish(raw, f"s3://hanzo-ml/datasets/{name}", "split")

    def split(self, dataset: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Artifact]:
        parts = {"train": rows[:-8], "validation": rows[-8:-4], "test": rows[-4:]}
        return {name: self.publish(f"{dataset}/{name}", part) for name, part in parts.items()}

    def recipe(self, **changed: Any) -> Recipe:
        base = {"uri": self.model.as_uri(), "sha256": hash_model_folder(self.model)}
        return Recipe.model_validate(SMALL | {"base_model": base} | changed)

    def training_job(self, name: str, recipe: Recipe) -> Job:
        role = recipe.trained_role
        return self._job(
            Program.TRAIN,
            name,
            {"run": self.run, "train": self.splits["train"], "validation": self.splits["validation"]},
            {"recipe": recipe.model_dump(mode="json")},
            {"checkpoints": f"s3://hanzo-ml/checkpoints/{name}", role: f"s3://hanzo-ml/runs/{name}/{role}"},
            tracking=Tracking(uri="http://127.0.0.1:9", run_id=name),  # no server listens there
            checkpoint=CheckpointPolicy(interval_steps=2),
            distributed=recipe.distributed,
        )

    def train(self, name: str, **changed: Any) -> Result:
        job = self.training_job(name, self.recipe(**changed))
        before = signal.getsignal(signal.SIGTERM)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(program, "METRICS_GRACE_SECONDS", 0)
            try:
                return program.train(job, self.store, made(job))
            finally:
                signal.signal(signal.SIGTERM, before)  # restore the handler that the program replaced

    def untrained(self, **changed: Any) -> Result:
        """Return a result as if training had produced an adapter of random numbers."""
        cache = self.folder / "cache"
        cache.mkdir(exist_ok=True)
        base = base_model.resolve_base_model(self.recipe(**changed).base_model, self.store, cache)
        adapter = make_tiny_adapter(self.model, self.folder / "adapter")
        artifacts = {"base": base, "adapter": self.store.publish(adapter, "s3://hanzo-ml/runs/untrained/adapter", "adapter")}
        return Result(work_digest="0" * 64, artifacts=artifacts, metrics={}, facts={})

    def lose_checkpoints(self, name: str, after: int) -> None:
        """Leave what another machine finds after a kill soon after step `after`."""
        shutil.rmtree(self.folder / "work" / name)
        uri = f"s3://hanzo-ml/checkpoints/{name}"
        steps = {found.removeprefix(f"{uri}/").split("/")[0] for found in self.store.list(uri)}
        for step in steps:
            if int(step) > after:
                self.store.delete(f"{uri}/{step}")

    def evaluate(self, name: str, trained: Result, **changed: Any) -> Result:
        job = self._job(
            Program.EVALUATE,
            f"{name}-evaluate",
            {**trained.artifacts, "test": self.splits["test"]},
            {"recipe": self.recipe(**changed).model_dump(mode="json"), "max_new_tokens": 4},
            {"evaluation": f"s3://hanzo-ml/runs/{name}/evaluation"},
        )
        return evaluate(job, self.store, made(job))

    def convert(self, name: str, trained: Result, **changed: Any) -> Result:
        job = self._job(
            Program.CONVERT,
            f"{name}-convert",
            dict(trained.artifacts),
            {"recipe": self.recipe(**changed).model_dump(mode="json"), "quantization": "F16"},
            {role: f"s3://hanzo-models/{name}/{role}" for role in ("merged", "gguf")},
        )
        return convert(job, self.store, made(job))

    def fetch(self, artifact: Artifact) -> Path:
        return self.store.fetch(artifact, self.folder / "cache")

    def _job(
        self,
        program: Program,
        name: str,
        inputs: dict[str, Artifact],
        parameters: dict[str, Any],
        outputs: dict[str, str],
        **more: Any,
    ) -> Job:
        return Job(
            id=name,
            program=program,
            inputs=inputs,
            parameters=parameters,
            outputs=outputs,
            result_uri=f"s3://hanzo-ml/runs/{name}/result.json",
            store=self.store.address,
            work_dir=str(self.folder / "work" / name),
            cache_dir=str(self.folder / "cache"),
            hardware=Hardware(cpu=1),
            **more,
        )


def losses(result: Result) -> list[float]:
    """Return the loss of each step that this process computed."""
    return list(result.facts["losses"].values())  # type: ignore[union-attr]


def made(job: Job) -> Path:
    work = Path(job.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    return work
