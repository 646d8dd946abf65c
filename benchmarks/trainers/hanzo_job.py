"""Our training program, as a regular job that logs every step."""

import json
from pathlib import Path

import httpx

from benchmarks.trainers.model_shapes import LEARNING_RATE, LORA_ALPHA, LORA_RANK, MAX_GRAD_NORM, SAVES, TARGETS, Work
from recipes.contracts.job import Job, Program, StoreAddress, Tracking
from recipes.contracts.recipe import Recipe
from recipes.storage.artifact_store import Store
from recipes.storage.base_model_folder import hash_model_folder

NF4 = {"base_dtype": "nf4", "double_quant": True}
HELD_OUT = 4
"""Records of the validation split, which only our program requires."""


def make_recipe(work: Work) -> Recipe:
    """Return the recipe that trains one epoch of the work."""
    folder = Path(work.model)
    return Recipe.model_validate(
        {
            "name": "benchmark",
            "description": "one epoch",
            "base_model": {"uri": folder.as_uri(), "sha256": hash_model_folder(folder)},
            "method": work.method,
            **(NF4 | {"compute_dtype": work.dtype} if work.method == "qlora" else {"base_dtype": work.dtype}),
            "lora_rank": LORA_RANK,
            "lora_alpha": LORA_ALPHA,
            "lora_target_modules": TARGETS,
            "learning_rate": LEARNING_RATE,
            "max_grad_norm": MAX_GRAD_NORM,
            "batch_size": work.batch_size,
            "max_steps": work.steps,
            "sequence_length": work.sequence_length,
            "hardware": {"cpu": work.threads},
            "checkpoint": {"interval_steps": -(-work.steps // SAVES)},
        }
    )


def make_job(work: Work, place: Path, tracking_uri: str, run_id: str) -> Job:
    """Return the job, with its data published to a separate store."""
    store = Store(
        StoreAddress(root=(place / "objects").as_uri(), buckets={n: n for n in ("datasets", "models", "checkpoints")})
    )
    held_out = place / "validation"
    held_out.mkdir(parents=True)
    lines = work.path("train/train.jsonl").read_text().splitlines(keepends=True)
    (held_out / "validation.jsonl").write_text("".join(lines[:HELD_OUT]))
    record = place / "record"
    record.mkdir()
    (record / "run.json").write_text(json.dumps({"benchmark": run_id}))
    recipe = make_recipe(work)
    folders = {"run": record, "train": work.path("train"), "validation": held_out}
    return Job(
        id=run_id,
        program=Program.TRAIN,
        inputs={
            name: store.publish(folder, f"s3://hanzo-ml/datasets/benchmark/{name}", "split")
            for name, folder in folders.items()
        },
        parameters={"recipe": recipe.model_dump(mode="json")},
        outputs={name: f"s3://hanzo-ml/runs/{run_id}/{name}" for name in ("checkpoints", "adapter")},
        result_uri=f"s3://hanzo-ml/runs/{run_id}/train.json",
        store=store.address,
        work_dir=str(place / "work"),
        cache_dir=str(place / "cache"),
        tracking=Tracking(uri=tracking_uri, run_id=run_id),
        hardware=recipe.hardware,
        checkpoint=recipe.checkpoint,
    )


def new_run(port: int) -> str:
    """Create a run on a local server."""
    url = f"http://127.0.0.1:{port}/v1/runs"
    made = httpx.post(url, json={"experiment_name": "benchmark"}, trust_env=False).raise_for_status().json()
    return str(made["id"])
