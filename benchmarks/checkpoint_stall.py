"""Measure how long checkpoints stall training at a realistic interval.

Usage: python -m benchmarks.checkpoint_stall [--interval 60s] [--checkpoints 3]

Our program trains all weights of a small Llama, with optimizer state, and is asked to stop after a number of checkpoints, as
if its machine were preempted.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.trainers.hanzo_job import make_job
from benchmarks.trainers.model_shapes import Shape
from benchmarks.trainers.workload import make_work
from recipes.contracts.job import EXIT_PREEMPTED, Job
from recipes.contracts.quantities import parse_duration
from recipes.contracts.recipe import Recipe
from recipes.contracts.results import read_usage, result_folder
from recipes.storage.artifact_store import Store

FORTY_MILLION = Shape(4096, 512, 1408, 12, 8, 8, True, "float32", 512, 2)
"""40 million parameters: a checkpoint is 0.5 GB, a step some seconds."""
RECORDS = 300
NOBODY = "http://127.0.0.1:9"
"""An unreachable tracking server, so that logged metrics are part of the checkpoint."""


def job_with(work_folder: Path, place: Path, interval: str) -> Job:
    """Return a job that trains all weights without end, with a checkpoint every interval."""
    work = make_work(work_folder, FORTY_MILLION, "lora", RECORDS, os.cpu_count() or 1, work_folder.with_name("models"))
    job = make_job(work, place, NOBODY, "stall")
    recipe = Recipe.model_validate(job.parameters["recipe"]).changed(
        {
            "method": "full",
            "dtype": "float32",
            "max_steps": 1_000_000,
            "checkpoint": {"interval": interval, "interval_steps": 1_000_000},
        }
    )
    outputs = {"checkpoints": job.outputs["checkpoints"], "weights": job.outputs["adapter"]}
    parameters = {"recipe": recipe.model_dump(mode="json")}
    return job.model_copy(update={"parameters": parameters, "outputs": outputs, "checkpoint": recipe.checkpoint})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--interval", default="60s")
    options.add_argument("--checkpoints", type=int, default=3, help="before the last one, which is saved at the stop")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        job = job_with(folder / "work", folder / "ours", asked.interval)
        (folder / "job.json").write_text(job.model_dump_json())
        checkpoints = Path(job.work_dir) / "checkpoints"
        program = subprocess.Popen(
            [sys.executable, "-m", "recipes.train", str(folder / "job.json")], stdout=subprocess.DEVNULL
        )
        while program.poll() is None and len(list(checkpoints.glob("[0-9]*"))) < asked.checkpoints:
            time.sleep(1.0)
        # On average, a stop comes half an interval after a checkpoint.
        time.sleep(parse_duration(asked.interval) / 2)
        program.send_signal(signal.SIGTERM)
        if (code := program.wait()) != EXIT_PREEMPTED:
            raise SystemExit(f"training ended with {code}")
        newest = max((path for path in checkpoints.glob("[0-9]*")), key=lambda path: int(path.name))
        usage = read_usage(Store(job.store), result_folder(job))
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    print(
        f"{usage.num_checkpoints} checkpoints of {size / 1e6:,.0f} MB in {usage.seconds:.0f} s, every {asked.interval}: "
        f"training was stalled for {usage.checkpoint_share:.2%} of the time, {usage.longest_checkpoint:.2f} s at most"
    )


if __name__ == "__main__":
    main()
