"""The program train: fine-tune a base model with a recipe, from wherever the run's last valid checkpoint is.

Resuming is bit-exact: the same losses and the same final weights as a run that nobody killed. Everything that decides a
number (weights, optimizer, schedule, random states, place in the data) is in the checkpoint; everything else is derived
from the job.
"""

import os
from pathlib import Path

import torch
from transformers import AutoTokenizer, PrinterCallback, set_seed

from recipes import base_model
from recipes.checkpoints import Checkpoints
from recipes.incidents import read_incidents
from recipes.parameters import TrainParameters
from recipes.runner import Preempted, main, say
from recipes.schema import Job, Result
from recipes.store import Store
from recipes.training.facts import facts_of
from recipes.training.healing import restart_smaller, roll_back
from recipes.training.logged import LogToTracking
from recipes.training.machine import refuse_what_the_machine_lacks
from recipes.training.metrics import open_metrics
from recipes.training.model import load_for_training
from recipes.training.objective_trainer import ObjectiveTrainer
from recipes.training.objectives import objective_of
from recipes.training.out_of_memory import is_out_of_memory
from recipes.training.publishing import publish_trained
from recipes.training.resuming import check_position, where_to_resume
from recipes.training.samples import SampleOrder, SamplesOfRun
from recipes.training.saving import CheckpointWhenDue, SaveTheBest
from recipes.training.start import copy_weights
from recipes.training.stopping import StopOnDivergence, StopOnSignal
from recipes.training.trainable import refuse_what_is_missing
from recipes.training.trainer import arguments
from recipes.training.usage import Meter, work_of_step

METRICS_GRACE_SECONDS = 600
"""How long a finished run waits for a tracking server that is down, before it ends without its last points."""
STOPPED_GRACE_SECONDS = 30
"""The same of a run that was stopped, and goes on later: its checkpoint holds what was not sent."""


def train(job: Job, store: Store, work: Path) -> Result:
    """Fine-tune. Inputs: `run`, `train`, `validation`, and `start` where other weights than the base model's are given.

    Outputs: `checkpoints`, and `adapter` or `weights`.

    Raises:
        BadConfiguration: the recipe does not fit the model or the data, or asks for what this program cannot do.
        Preempted: SIGTERM came; a checkpoint was saved.
        Restart: memory ran out or the loss diverged, and the run can go on otherwise.
    """
    recipe = TrainParameters.model_validate(job.parameters).recipe
    refuse_what_is_missing(recipe)
    refuse_what_the_machine_lacks(recipe)
    incidents = read_incidents(store, job.outputs["checkpoints"])
    recipe = incidents.fitted(recipe)
    cache = Path(job.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(job.hardware.cpu or os.cpu_count() or 1)
    base = base_model.resolve(recipe.base_model, store, cache)
    folder = store.fetch(base, cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    objective = objective_of(recipe)
    rows = {split: objective.rows(job.inputs[split], store, cache, tokenizer) for split in ("train", "validation")}
    order = SampleOrder(len(rows["train"]), recipe.seed, incidents.skipped)
    samples = SamplesOfRun(order, recipe.samples_per_step, recipe.max_steps)

    set_seed(recipe.seed)
    model = load_for_training(folder, recipe)
    checkpoints = Checkpoints(work / "checkpoints", store, job.outputs["checkpoints"], job.checkpoint.keep_last)
    checkpoints, resume = where_to_resume(checkpoints, job.checkpoint.resume_from)
    if resume is None and (start := job.inputs.get("start")):
        copy_weights(model, start, store.fetch(start, cache))
        say(f"starting from the weights of {start.uri}")
    if resume:
        check_position(resume, samples)
    metrics = open_metrics(job, resume, incidents.steps_done_anew)
    meter = Meter(resume)
    # The run's own statement: how a resumed process differs from a fresh one is visible in its log.
    say(f"resuming from checkpoint {resume[0]} of {recipe.max_steps}" if resume else f"starting {recipe.max_steps} steps")

    stop = StopOnSignal()
    divergence = StopOnDivergence(recipe.divergence)
    logged = LogToTracking(metrics, work_of_step(recipe, folder), meter)
    trainer = ObjectiveTrainer(
        model=model,
        args=arguments(recipe, work),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        objective=objective,
        processing_class=tokenizer,
        callbacks=[CheckpointWhenDue(job.checkpoint), SaveTheBest(), stop, divergence, logged],
        checkpoints=checkpoints,
        samples=samples,
        metrics=metrics,
        meter=meter,
    )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train(resume_from_checkpoint=str(resume[1]) if resume else None)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        metrics.close(timeout=STOPPED_GRACE_SECONDS)
        raise restart_smaller(store, job.outputs["checkpoints"], recipe, trainer.state.global_step + 1) from error
    usage = meter.read()
    checkpoints.wait()
    lost = metrics.close(timeout=STOPPED_GRACE_SECONDS if stop.requested or divergence.found else METRICS_GRACE_SECONDS)
    if divergence.found:
        chosen = roll_back(store, job.outputs["checkpoints"], recipe, checkpoints, samples, divergence.found)
    elif stop.requested and trainer.state.global_step < recipe.max_steps:
        raise Preempted(f"checkpoint {trainer.state.global_step} holds everything")
    else:
        chosen = checkpoints.best() if recipe.publish == "best" else None
    if chosen:
        trainer.take_weights(chosen[1])
    if lost:
        say(f"{len(lost)} metric points could not be sent: the tracking server did not answer")
    trained = publish_trained(trainer.model, tokenizer, store, job, base, work)
    return Result(
        work_digest=job.work_digest,
        artifacts={trained.kind: trained, "base": base},
        metrics={"total_steps": float(trainer.state.global_step)},
        facts=facts_of(
            trainer,
            recipe,
            usage,
            read_incidents(store, job.outputs["checkpoints"]),
            resumed_from=resume[0] if resume else None,
            published=chosen[0] if chosen else trainer.state.global_step,
            unsent=len(lost),
        ).model_dump(mode="json"),
    )


if __name__ == "__main__":
    main(train)
