"""The program train: fine-tune a base model with a recipe, from wherever the run's last valid checkpoint is.

Resuming is bit-exact: the same losses and the same final weights as a run that nobody killed. Everything that decides a
number (weights, optimizer, schedule, random states, place in the data) is in the checkpoint; everything else is derived
from the job.
"""

import math
import os
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, PrinterCallback, set_seed

from recipes import base_model
from recipes.checkpoints import Checkpoints
from recipes.parameters import TrainParameters
from recipes.results import TrainingFacts
from recipes.runner import Preempted, main, say
from recipes.schema import Job, Result
from recipes.store import Store
from recipes.training.callbacks import CheckpointWhenDue, LogToTracking, StopOnSignal
from recipes.training.machine import refuse_what_the_machine_lacks
from recipes.training.metrics import open_metrics
from recipes.training.model import load_for_training
from recipes.training.objective_trainer import ObjectiveTrainer
from recipes.training.objectives import objective_of
from recipes.training.publishing import publish_trained
from recipes.training.start import copy_weights
from recipes.training.trainable import refuse_what_is_missing
from recipes.training.trainer import arguments

METRICS_GRACE_SECONDS = 600
"""How long a finished run waits for a tracking server that is down, before it ends without its last points."""


def train(job: Job, store: Store, work: Path) -> Result:
    """Fine-tune. Inputs: `run`, `train`, `validation`, and `start` where other weights than the base model's are given.

    Outputs: `checkpoints`, and `adapter` or `weights`.

    Raises:
        BadConfiguration: the recipe does not fit the model or the data, or asks for what this program cannot do.
        Preempted: SIGTERM came; a checkpoint was saved.
    """
    recipe = TrainParameters.model_validate(job.parameters).recipe
    refuse_what_is_missing(recipe)
    refuse_what_the_machine_lacks(recipe)
    cache = Path(job.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(job.hardware.cpu or os.cpu_count() or 1)
    base = base_model.resolve(recipe.base_model, store, cache)
    folder = store.fetch(base, cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    objective = objective_of(recipe)
    rows = {split: objective.rows(job.inputs[split], store, cache, tokenizer) for split in ("train", "validation")}

    set_seed(recipe.seed)
    model = load_for_training(folder, recipe)
    checkpoints = Checkpoints(work / "checkpoints", store, job.outputs["checkpoints"], job.checkpoint.keep_last)
    resume = checkpoints.latest()
    if resume is None and (start := job.inputs.get("start")):
        copy_weights(model, start, store.fetch(start, cache))
        say(f"starting from the weights of {start.uri}")
    metrics = open_metrics(job, resume)
    # The run's own statement: how a resumed process differs from a fresh one is visible in its log.
    say(f"resuming from checkpoint {resume[0]} of {recipe.max_steps}" if resume else f"starting {recipe.max_steps} steps")

    stop = StopOnSignal()
    trainer = ObjectiveTrainer(
        model=model,
        args=arguments(recipe, work),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        objective=objective,
        processing_class=tokenizer,
        callbacks=[CheckpointWhenDue(job.checkpoint), stop, LogToTracking(metrics)],
        checkpoints=checkpoints,
        metrics=metrics,
    )
    trainer.remove_callback(PrinterCallback)
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=str(resume[1]) if resume else None)
    seconds = time.monotonic() - started
    checkpoints.wait()
    lost = metrics.close(timeout=30 if stop.requested else METRICS_GRACE_SECONDS)
    if stop.requested and trainer.state.global_step < recipe.max_steps:
        raise Preempted(f"checkpoint {trainer.state.global_step} holds everything")
    if lost:
        say(f"{len(lost)} metric points could not be sent: the tracking server did not answer")
    trained = publish_trained(trainer.model, tokenizer, store, job, base, work)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return Result(
        work_digest=job.work_digest,
        artifacts={trained.kind: trained, "base": base},
        metrics={"total_steps": float(trainer.state.global_step)},
        facts=TrainingFacts(
            train_seconds=round(seconds, 3),
            resumed_from=resume[0] if resume else None,
            unsent_metrics=len(lost),
            losses={step: loss if math.isfinite(loss) else None for step, loss in losses.items()},
        ).model_dump(mode="json"),
    )


if __name__ == "__main__":
    main(train)
