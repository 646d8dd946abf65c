"""The program train: fine-tune a base model with a recipe, from wherever the run's last valid checkpoint is.

Resuming is bit-exact: the same losses and the same final weights as a run that nobody killed. Everything that decides a
number (weights, optimizer, schedule, random states, place in the data) is in the checkpoint; everything else is derived
from the job.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.startup import begin_imports

if __name__ == "__main__":
    begin_imports()

import torch
from peft import PeftModel
from transformers import PrinterCallback, set_seed

from hanzo_ml.client.points import Point
from hanzo_ml.client.repeated_steps import NEVER, Anew, first_until
from recipes.checkpoints.manager import Checkpoints
from recipes.checkpoints.node_parts import part_in
from recipes.contracts.job import Job, Result
from recipes.contracts.recovery_log import read_incidents
from recipes.counted import counted
from recipes.launch import computes_whole_blocks, saves_by_name
from recipes.machine import cores
from recipes.runner import Preempted, Restart, main, say
from recipes.storage.artifact_store import Store
from recipes.training.checkpointing.save_schedule import CheckpointWhenDue, SaveTheBest
from recipes.training.compilation import are_compiled, compile_blocks
from recipes.training.data.packing import PackedRows
from recipes.training.data.prefetch import ReadAhead
from recipes.training.data.sample_order import RowsOrNone, SampleOrder, SamplesOfRun
from recipes.training.determinism import compute_alike_each_time, compute_with_what_there_is
from recipes.training.discarding import DIVERGENCES, forget_beside
from recipes.training.facts import facts_of
from recipes.training.material import Material, gather
from recipes.training.metrics import open_metrics
from recipes.training.metrics.tracking import LogToTracking
from recipes.training.metrics.usage import Meter, WriteUsage, gpus_held, peak_memory, work_of_token
from recipes.training.model import load_for_training
from recipes.training.objective_trainer import ObjectiveTrainer
from recipes.training.packed_attention import attend_where_it_fits
from recipes.training.parallel.pipeline import PipelineTrainer
from recipes.training.publishing import publish_trained, save_chosen
from recipes.training.random_states import within_32_bits
from recipes.training.recovery import restart_after, roll_back
from recipes.training.resuming import COMPILED, MADE_WITH, is_over, made_with, owes_evaluation, tell_other_rounding
from recipes.training.run_setup import Course, take_up
from recipes.training.start import start_from
from recipes.training.stopping import Ends, StopOnDivergence, StopOnSignal, StopToRepeat
from recipes.training.trainer import arguments
from recipes.unsent_metrics import UnsentPoint, write_unsent
from recipes.usage import Usage, folder_of, read_usage, write_usage

METRICS_GRACE_SECONDS = 60
"""How long a finished run waits for a tracking server that is down, before its last points go with its result."""
STOPPED_GRACE_SECONDS = 30
"""The same of a run that was stopped, and goes on later: its checkpoint holds what was not sent."""


def train(job: Job, store: Store, work: Path) -> Result | None:
    """Fine-tune. Inputs: `run`, `train`, `validation`, and `start` where other weights than the base model's are given.

    Outputs: `checkpoints`, and `adapter` or `weights`. Of several processes (`Job.distributed`) the leader has the result.

    Raises:
        BadConfiguration: the recipe does not fit the model or the data, or asks for what this program cannot do.
        Preempted: SIGTERM came; a checkpoint was saved, where the job wants one then.
        Restart: memory ran out, the loss diverged, an operation was refused, or a block was not to be compiled, and the run
            can go on otherwise.
    """
    began = time.monotonic()
    compute_alike_each_time()
    course = take_up(job, store, work)
    recipe, group = course.recipe, course.group
    if refused := course.incidents.not_deterministic:
        compute_with_what_there_is()
        say(refused[0].words)
    torch.set_num_threads(max(1, cores(job.hardware.cpu) // group.on_this_node))
    material = gather(job, recipe, group, store)
    model = build_model(job, course, material, store)
    group.collect(None)  # files may come to one later than to others, and what trains waits for ten minutes at most (NCCL)
    ends = Ends(
        StopOnSignal(group, saves=job.checkpoint.save_on_preempt),
        StopOnDivergence(recipe.divergence),
        StopToRepeat(course.repeats),
    )
    trainer = build_trainer(job, course, material, model, ends, store, work, began)
    if group.size > 1:
        set_seed(within_32_bits(recipe.seed + group.stream))  # other rows drop out others, on equal weights
    run(trainer, course, store, folder_of(job))
    trainer.meter.learn_peaks(group.collect(peak_memory()))
    if not group.leads:  # its node's part; the leader has use for the whole
        wait_for_uploads(course, goes_on=True)
        if (found := ends.divergence.found) and group.local_rank == 0:
            forget_beside(course.checkpoints, found, course.repeats)
    group.disband()
    return leave(job, course, material, trainer, ends, store, work) if group.leads else None


def build_model(job: Job, course: Course, material: Material, store: Store) -> Any:
    """The base model with what is trained of it, as it is before the run's first step."""
    set_seed(course.recipe.seed)
    model = load_for_training(material.folder, course.recipe)
    material.objective.begin(model)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if material.objective.packed or material.objective.padded_behind:
        attend_where_it_fits(base, course.recipe)
    if failed := course.incidents.not_compiled:
        say(failed[0].words)
    elif material.objective.packed and computes_whole_blocks(course.recipe):
        compile_blocks(base, Path(job.cache_dir))
    if course.resume is None and (start := job.inputs.get("start")):
        start_from(start, model, course.recipe, course.group, store, Path(job.cache_dir))
    return model


def build_trainer(
    job: Job, course: Course, material: Material, model: Any, ends: Ends, store: Store, work: Path, began: float
) -> ObjectiveTrainer:
    """What trains `model` from the checkpoint on that the run has come to, in a program that `began` then."""
    recipe, group, resume = course.recipe, course.group, course.resume
    evaluates_first = resume is not None and owes_evaluation(resume[1], recipe)
    anew = course.steps_done_anew
    metrics = open_metrics(job, resume, anew, evaluates_first=evaluates_first) if group.leads else None
    meter = Meter(read_usage(store, folder_of(job)) if group.leads else Usage(), gpus_held(job), began)
    # The run's own statement: how a resumed process differs from a fresh one is visible in its log.
    begins = f"starting {counted(recipe.max_steps, 'step')}"
    say(f"resuming from checkpoint {resume[0]} of {recipe.max_steps}" if resume else begins)
    compiled = are_compiled(model)
    if resume:
        tell_other_rounding(resume, compiled)
    policy = job.checkpoint.of_unstable() if course.incidents.skipped else job.checkpoint
    saving = [CheckpointWhenDue(policy, group), SaveTheBest()]
    per_token, has_perplexity = work_of_token(recipe, material.folder), material.objective.has_perplexity
    told = [LogToTracking(metrics, per_token, meter, has_perplexity=has_perplexity)] if metrics else []
    written = [WriteUsage(meter, store, folder_of(job))] if group.leads else []
    rows = material.rows["train"]
    order = SampleOrder(len(rows), recipe.seed, course.incidents.skipped)
    samples = SamplesOfRun(order, recipe.samples_per_step, recipe.max_steps)
    ahead = [ReadAhead(rows, samples, recipe.batch_size, group)] if isinstance(rows, PackedRows) else []
    kind = PipelineTrainer if recipe.stages > 1 else ObjectiveTrainer
    trainer = kind(
        model=model,
        args=arguments(recipe, work, model, evaluate_first=evaluates_first),
        train_dataset=RowsOrNone(rows) if recipe.rows_per_step else rows,
        eval_dataset=material.rows["validation"],
        objective=material.objective,
        stop=ends.signal,
        processing_class=material.tokenizer,
        callbacks=[*saving, ends.signal, ends.divergence, ends.repeat, *told, *written, *ahead],
        checkpoints=course.checkpoints,
        facts={
            MADE_WITH: made_with(recipe),
            DIVERGENCES: len(course.incidents.diverged),
            **({COMPILED: True} if compiled else {}),
        },
        samples=samples,
        metrics=metrics,
        meter=meter,
        divergence=ends.divergence,
        group=group,
        in_rows=saves_by_name(recipe),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(trainer: ObjectiveTrainer, course: Course, store: Store, folder: str) -> None:
    """Train until the run is over or something ends it.

    Raises:
        Restart: a step did not fit into memory, or came to what cannot be computed the same each time, or not be compiled.
    """
    try:
        trainer.train(resume_from_checkpoint=str(course.resume[1]) if course.resume else None)
        trainer.staging.close()
    except Exception as error:
        try:
            if trainer.metrics:  # of what fails for good too: what it logged last, and that it has cost something
                trainer.metrics.close(timeout=STOPPED_GRACE_SECONDS)
                write_usage(store, folder, trainer.meter.read(trainer.state))
            step = trainer.state.global_step + 1
            if restart := restart_after(error, course.incidents, store, course.uri, course.recipe, step):
                raise restart from error
            raise
        finally:
            # What happened is written down by now: the other processes wait for this one, and end it after minutes. An
            # upload that is cut off would be on this machine alone until the next start.
            finish_writing(trainer, course)
            wait_for_uploads(course, goes_on=True)


def finish_writing(trainer: ObjectiveTrainer, course: Course) -> None:
    """The newest checkpoint of a run that has failed: what keeps it from being one must not stand for that."""
    for finish in (trainer.staging.close, course.checkpoints.settle):
        try:
            finish()
        except Exception as problem:
            say(f"the newest checkpoint is not whole: {type(problem).__name__}: {' '.join(str(problem).split())}")


def leave(
    job: Job, course: Course, material: Material, trainer: ObjectiveTrainer, ends: Ends, store: Store, work: Path
) -> Result:
    """Publish the weights of a run that has ended. Raises Preempted or Restart of one that goes on later."""
    recipe = course.recipe
    usage = trainer.meter.read(trainer.state)
    ends_early = ends.signal.requested or ends.divergence.found
    wait_for_uploads(course, goes_on=bool(ends_early))
    grace = STOPPED_GRACE_SECONDS if ends_early else METRICS_GRACE_SECONDS
    unsent = trainer.metrics.close(timeout=grace) if trainer.metrics else []
    chosen = weights_to_leave(course, trainer, ends, store)
    course.checkpoints.make_room(spared=chosen[0] if chosen else None)
    out = work / recipe.trained_role
    published = save_chosen(trainer, chosen, material.folder, recipe, out)
    if unsent:
        write_unsent(store, folder_of(job), (left(point, course.steps_done_anew) for point in unsent))
        say(f"{counted(len(unsent), 'metric point')} went with the result: the tracking server did not answer")
    trained = publish_trained(out, material.tokenizer, store, job, material.base, recipe)
    usage = usage.model_copy(update={"gpu_seconds": trainer.meter.read(trainer.state).gpu_seconds})
    return Result(
        work_digest=job.work_digest,
        artifacts={trained.kind: trained, "base": material.base},
        metrics={"total_steps": float(trainer.state.global_step)},
        facts=facts_of(
            trainer,
            usage,
            read_incidents(store, course.uri),
            resumed_from=course.resume[0] if course.resume else None,
            published=published,
            unsent=len(unsent),
        ).model_dump(mode="json"),
    )


def left(point: Point, anew: Sequence[Anew]) -> UnsentPoint:
    """A point as it goes with the result of a run that did those steps `anew`."""
    until = first_until(anew, point.step)
    return UnsentPoint(**vars(point), anew=until is not None, since=None if until == NEVER else until)


def wait_for_uploads(course: Course, *, goes_on: bool) -> None:
    """A run that `goes_on` later needs its checkpoints here alone; that its newest is no place else is said, not its end.

    Whatever kept it from there: it must not stand for the error that the run ends with, and its next start tries again.
    """
    course.checkpoints.settle()
    try:
        course.checkpoints.wait()
    except Exception as problem:
        if not goes_on:
            raise
        say(f"{newest_here(course.checkpoints)} is on this machine alone: {' '.join(str(problem).split())}")


def newest_here(checkpoints: Checkpoints) -> str:
    """What this machine has of the newest checkpoint: of what several save together, each has its part."""
    here = checkpoints.local_steps()
    part = part_in(checkpoints.folder / str(here[0])) if here else None
    return f"part {part.number} of {part.of} of the newest checkpoint" if part else "the newest checkpoint"


def weights_to_leave(course: Course, trainer: ObjectiveTrainer, ends: Ends, store: Store) -> tuple[int, Path] | None:
    """The checkpoint whose weights the run leaves; None: those that training ended with."""
    recipe, state = course.recipe, trainer.state
    if found := ends.divergence.found:
        return roll_back(store, course.uri, recipe, course.checkpoints, trainer.samples, found, course.repeats)
    if ends.signal.requested and not is_over(state, recipe):
        raise Preempted(what_is_left(course, state.global_step))
    if ends.repeat.reached and not is_over(state, recipe):
        raise Restart(f"after step {state.global_step} the run that is repeated took smaller micro-batches")
    course.checkpoints.close_parts()
    return course.checkpoints.best() if recipe.publish == "best" else None


def what_is_left(course: Course, step: int) -> str:
    """In words, of a run that was stopped after `step`."""
    known = [*course.checkpoints.local_steps(), course.resume[0] if course.resume else 0]
    newest = max(saved for saved in known if saved <= step)
    if step and newest == step:
        return f"checkpoint {step} holds everything"
    return f"stopped after step {step}: on from {f'checkpoint {newest}' if newest else 'the beginning'}"


if __name__ == "__main__":
    main(train)
