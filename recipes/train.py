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
from recipes.arithmetic import tell_fallback
from recipes.checkpoints import Checkpoints
from recipes.incidents import Incidents, read_incidents
from recipes.launch import sharding, trains_shards, zero_stage
from recipes.runner import Preempted, Restart, main, say
from recipes.schema import BadConfiguration, Job, Result
from recipes.store import Store
from recipes.training import zero
from recipes.training.facts import facts_of
from recipes.training.group import join
from recipes.training.healing import restart_smaller, roll_back, what_happened
from recipes.training.logged import LogToTracking
from recipes.training.machine import refuse_what_the_machine_lacks
from recipes.training.metrics import open_metrics
from recipes.training.model import load_for_training
from recipes.training.objective_trainer import ObjectiveTrainer
from recipes.training.objectives import objective_of
from recipes.training.out_of_memory import is_out_of_memory
from recipes.training.parameters import TrainParameters
from recipes.training.publishing import publish_trained, save_spread, save_trained
from recipes.training.resuming import check_position, is_over, owes_evaluation, where_to_resume
from recipes.training.samples import SampleOrder, SamplesOfRun
from recipes.training.saving import CheckpointWhenDue, SaveTheBest
from recipes.training.sharded import load_weights
from recipes.training.start import copy_weights
from recipes.training.stopping import StopOnDivergence, StopOnSignal, StopToRepeat
from recipes.training.trainable import refuse_what_is_missing
from recipes.training.trainer import arguments
from recipes.training.usage import Meter, work_of_step

METRICS_GRACE_SECONDS = 600
"""How long a finished run waits for a tracking server that is down, before it ends without its last points."""
STOPPED_GRACE_SECONDS = 30
"""The same of a run that was stopped, and goes on later: its checkpoint holds what was not sent."""


def train(job: Job, store: Store, work: Path) -> Result | None:
    """Fine-tune. Inputs: `run`, `train`, `validation`, and `start` where other weights than the base model's are given.

    Outputs: `checkpoints`, and `adapter` or `weights`. Of several processes (`Job.distributed`) the leader has the result.

    Raises:
        BadConfiguration: the recipe does not fit the model or the data, or asks for what this program cannot do.
        Preempted: SIGTERM came; a checkpoint was saved.
        Restart: memory ran out or the loss diverged, and the run can go on otherwise.
    """
    parameters = TrainParameters.model_validate(job.parameters)
    recipe = parameters.recipe
    refuse_what_is_missing(recipe)
    refuse_what_the_machine_lacks(recipe)
    group = join(job.distributed)
    if group.leads:
        tell_fallback(recipe.computing_dtype)
    recipe = recipe.on(group.size)
    policy, uri = job.checkpoint, job.outputs["checkpoints"]
    checkpoints = Checkpoints(work / "checkpoints", store, uri, policy.keep_last, policy.compression)
    with group.one_fetches():
        checkpoints, resume = where_to_resume(checkpoints, policy.resume_from)
    done, repeats = resume[0] if resume else 0, parameters.repeats
    found = what_happened(store, uri, recipe, work, done=done, repeats=repeats) if group.leads else Incidents()
    incidents = group.share(found)
    recipe = incidents.fitted(recipe)
    cache = Path(job.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(max(1, (job.hardware.cpu or os.cpu_count() or 1) // group.on_this_node))
    with group.one_fetches():
        base = base_model.resolve(recipe.base_model, store, cache)
        folder = store.fetch(base, cache)
        for split in ("train", "validation"):
            store.fetch(job.inputs[split], cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    objective = objective_of(recipe)
    rows = {}
    for split in ("train", "validation"):
        try:
            rows[split] = objective.rows(job.inputs[split], store, cache, tokenizer)
        except BadConfiguration as problem:
            raise BadConfiguration(f"the {split} split: {problem}") from None
    order = SampleOrder(len(rows["train"]), recipe.seed, incidents.skipped)
    samples = SamplesOfRun(order, recipe.samples_per_step, recipe.max_steps)

    set_seed(recipe.seed)
    model = load_for_training(folder, recipe)
    objective.begin(model)
    if resume is None and (start := job.inputs.get("start")):
        with group.one_fetches():
            weights = store.fetch(start, cache)
        if zero_stage(recipe) == 3 and recipe.method == "full":
            zero.load_weights(model, weights, leads=group.leads)
        elif trains_shards(recipe):
            load_weights(model, weights, group)
        else:
            copy_weights(model, f"input 'start' ({start.uri})", weights)
        say(f"starting from the weights of {start.uri}")
    if resume:
        check_position(resume, samples)
    evaluates_first = resume is not None and owes_evaluation(resume[1], recipe)
    anew = incidents.steps_done_anew
    metrics = open_metrics(job, resume, anew, evaluates_first=evaluates_first) if group.leads else None
    meter = Meter(resume)
    # The run's own statement: how a resumed process differs from a fresh one is visible in its log.
    say(f"resuming from checkpoint {resume[0]} of {recipe.max_steps}" if resume else f"starting {recipe.max_steps} steps")

    stop = StopOnSignal(group)
    divergence, repeat = StopOnDivergence(recipe.divergence), StopToRepeat(repeats)
    logged = [LogToTracking(metrics, work_of_step(recipe, folder), meter)] if metrics else []
    trainer = ObjectiveTrainer(
        model=model,
        args=arguments(recipe, work, model, evaluate_first=evaluates_first),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        objective=objective,
        stop=stop,
        processing_class=tokenizer,
        callbacks=[CheckpointWhenDue(policy, group), SaveTheBest(), stop, divergence, repeat, *logged],
        checkpoints=checkpoints,
        samples=samples,
        metrics=metrics,
        meter=meter,
        group=group,
        in_rows=trains_shards(recipe),
    )
    trainer.remove_callback(PrinterCallback)
    if group.size > 1:
        set_seed(recipe.seed + group.rank)  # each process drops out others, on equal weights
    try:
        trainer.train(resume_from_checkpoint=str(resume[1]) if resume else None)
    except Exception as error:
        checkpoints.settle()
        if not is_out_of_memory(error):
            raise
        if metrics:
            metrics.close(timeout=STOPPED_GRACE_SECONDS)
        raise restart_smaller(store, uri, recipe, trainer.state.global_step + 1) from error
    if metrics is None:
        return None
    usage = meter.read()
    checkpoints.wait()
    lost = metrics.close(timeout=STOPPED_GRACE_SECONDS if stop.requested or divergence.found else METRICS_GRACE_SECONDS)
    if divergence.found:
        chosen = roll_back(store, uri, recipe, checkpoints, samples, divergence.found)
    elif stop.requested and not is_over(trainer.state, recipe):
        raise Preempted(f"checkpoint {trainer.state.global_step} holds everything")
    elif repeat.reached and not is_over(trainer.state, recipe):
        raise Restart(f"after step {trainer.state.global_step} the run that is repeated took smaller micro-batches")
    else:
        chosen = checkpoints.best() if recipe.publish == "best" else None
    out = work / recipe.trained_role
    if sharding(recipe):  # no process has all weights, and the others have ended
        chosen = chosen or checkpoints.latest()
        published = chosen[0] if chosen else 0
        save_spread(chosen, folder, recipe, out)
    else:
        published = chosen[0] if chosen else trainer.state.global_step
        if chosen:
            trainer.take_weights(chosen[1])
        save_trained(trainer.model, folder, recipe, out)
    if lost:
        say(f"{len(lost)} metric points could not be sent: the tracking server did not answer")
    trained = publish_trained(out, tokenizer, store, job, base, recipe)
    return Result(
        work_digest=job.work_digest,
        artifacts={trained.kind: trained, "base": base},
        metrics={"total_steps": float(trainer.state.global_step)},
        facts=facts_of(
            trainer,
            recipe,
            usage,
            read_incidents(store, uri),
            resumed_from=resume[0] if resume else None,
            published=published,
            unsent=len(lost),
        ).model_dump(mode="json"),
    )


if __name__ == "__main__":
    main(train)
