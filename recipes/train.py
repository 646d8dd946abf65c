"""The program train.

Fine-tune a base model with a recipe, resuming from the last valid checkpoint. Resuming is bit-exact: losses and final
weights equal those of an uninterrupted run. Everything that affects a number (weights, optimizer, schedule, random states,
data position) is in the checkpoint; everything else is derived from the job.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.startup import prepare_imports

if __name__ == "__main__":
    prepare_imports()

import torch
from peft import PeftModel
from transformers import PrinterCallback, set_seed

from hanzo_ml.client.points import Point
from hanzo_ml.client.repeated_steps import UNKNOWN_TIME, RepeatedSteps, last_repeat_time
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import part_in_folder
from recipes.contracts.job import Job, Result
from recipes.contracts.quantities import pluralize
from recipes.contracts.recovery_log import read_recovery_log
from recipes.contracts.results import UnsentPoint, Usage, read_usage, result_folder, write_unsent_metrics, write_usage
from recipes.launch.rank_progress import PROGRESS_FOLDER
from recipes.machine import usable_cores
from recipes.planning.parallel_layout import computes_whole_blocks, saves_by_name
from recipes.runner import Preempted, Restart, log_line, main
from recipes.storage.artifact_store import Store
from recipes.training.checkpointing.resume_point import (
    COMPILED_FACT,
    MADE_WITH_FACT,
    describe_recipe,
    is_finished,
    needs_evaluation,
    warn_compilation_changed,
)
from recipes.training.checkpointing.save_schedule import SaveBestCheckpoint, SaveOnSchedule
from recipes.training.compilation import compile_blocks, has_compiled_blocks
from recipes.training.data.packing import PackedRows
from recipes.training.data.prefetch import RowPrefetcher
from recipes.training.data.sample_order import OptionalRows, RunSamples, SampleOrder
from recipes.training.determinism import allow_nondeterminism, enable_determinism, wrap_seed
from recipes.training.divergence import StopOnDivergence
from recipes.training.metrics.tracking import TrackingCallback, open_metric_buffer
from recipes.training.metrics.usage import UsageMeter, UsageWriter, count_held_gpus, peak_memory_bytes, token_cost
from recipes.training.model import load_model, load_starting_weights
from recipes.training.objective_trainer import ObjectiveTrainer
from recipes.training.packed_attention import use_packed_attention_if_supported
from recipes.training.parallel.pipeline import PipelineTrainer
from recipes.training.progress_reporter import ProgressReporter
from recipes.training.publishing import publish_weights, save_selected_weights, training_facts
from recipes.training.recovery import DIVERGENCES_FACT, discard_local_checkpoints, recover_from_error, roll_back
from recipes.training.run_setup import RunInputs, RunState, load_inputs, prepare_run
from recipes.training.stopping import StopCallbacks, StopForReplay, StopOnSignal
from recipes.training.training_arguments import training_arguments

METRICS_GRACE_SECONDS = 60
"""How long a finished run waits for an unavailable tracking server before storing its last points with the result."""
STOPPED_GRACE_SECONDS = 30
"""The same for a stopped run that will resume: its checkpoint contains unsent points."""


def train(job: Job, store: Store, work: Path) -> Result | None:
    """Fine-tune. Inputs: `train`, `validation`, and optionally `start` for initial weights.

    Outputs: `checkpoints`, and `adapter` or `weights`. In a distributed job (`Job.distributed`) only the leader returns a
    result.

    Raises:
        BadConfiguration: the recipe does not fit the model or the data, or is not supported.
        Preempted: SIGTERM was received; a checkpoint was saved if the job's policy asks for one.
        Restart: out of memory, divergence, a nondeterministic operation or a compile failure; the restarted run recovers.
    """
    began = time.monotonic()
    enable_determinism()
    course = prepare_run(job, store, work)
    recipe, group = course.recipe, course.group
    if refused := course.incidents.not_deterministic:
        allow_nondeterminism()
        log_line(refused[0].message)
    torch.set_num_threads(max(1, usable_cores(job.hardware.cpu) // group.local_size))
    material = load_inputs(job, recipe, group, store)
    model = build_model(job, course, material, store)
    group.all_gather(None)  # barrier: files may arrive later in one process, and NCCL waits for at most ten minutes
    ends = StopCallbacks(
        StopOnSignal(group, saves=job.checkpoint.save_on_preempt),
        StopOnDivergence(recipe.divergence),
        StopForReplay(course.repeats),
    )
    trainer = build_trainer(job, course, material, model, ends, store, work, began)
    if group.size > 1:
        # different dropout for different rows, after equal initialization
        set_seed(wrap_seed(recipe.seed + group.random_stream))
    run_training(trainer, course, store, result_folder(job))
    trainer.meter.record_peaks(group.all_gather(peak_memory_bytes()))
    if not group.is_leader:  # only the leader continues, to publish
        wait_for_uploads(course, resumes_later=True)
        if (found := ends.divergence.detected) and group.local_rank == 0:
            discard_local_checkpoints(course.checkpoints, found, course.repeats)
    group.destroy()
    return publish_run(job, course, material, trainer, ends, store, work) if group.is_leader else None


def build_model(job: Job, course: RunState, material: RunInputs, store: Store) -> Any:
    """Load the base model with its adapter, before the run's first step."""
    set_seed(course.recipe.seed)
    model = load_model(material.folder, course.recipe)
    material.objective.begin(model)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if material.objective.packed or material.objective.padded_behind:
        use_packed_attention_if_supported(base, course.recipe)
    if failed := course.incidents.not_compiled:
        log_line(failed[0].message)
    elif material.objective.packed and computes_whole_blocks(course.recipe):
        compile_blocks(base, Path(job.cache_dir))
    if course.resume is None and (start := job.inputs.get("start")):
        load_starting_weights(start, model, course.recipe, course.group, store, Path(job.cache_dir))
    return model


def build_trainer(
    job: Job, course: RunState, material: RunInputs, model: Any, ends: StopCallbacks, store: Store, work: Path, began: float
) -> ObjectiveTrainer:
    """Create the trainer, set up to resume from the run's checkpoint.

    `began` is the start time of the program.
    """
    recipe, group, resume = course.recipe, course.group, course.resume
    evaluates_first = resume is not None and needs_evaluation(resume[1], recipe)
    repeated_steps = course.repeated_steps
    metrics = (
        open_metric_buffer(job, resume, repeated_steps, evaluates_on_resume=evaluates_first) if group.is_leader else None
    )
    meter = UsageMeter(read_usage(store, result_folder(job)) if group.is_leader else Usage(), count_held_gpus(job), began)
    # Makes a resumed process recognizable in its log.
    begins = f"starting {pluralize(recipe.max_steps, 'step')}"
    log_line(f"resuming from checkpoint {resume[0]} of {recipe.max_steps}" if resume else begins)
    compiled = has_compiled_blocks(model)
    if resume:
        warn_compilation_changed(resume, compiled)
    policy = job.checkpoint.for_unstable_run() if course.incidents.skipped else job.checkpoint
    checkpoint_callbacks = [SaveOnSchedule(policy, group), SaveBestCheckpoint()]
    per_token, has_perplexity = token_cost(recipe, material.folder), material.objective.has_perplexity
    tracking_callbacks = [TrackingCallback(metrics, per_token, meter, has_perplexity=has_perplexity)] if metrics else []
    usage_callbacks = [UsageWriter(meter, store, result_folder(job))] if group.is_leader else []
    rows = material.rows["train"]
    order = SampleOrder(len(rows), recipe.seed, course.incidents.skipped)
    samples = RunSamples(order, recipe.samples_per_step, recipe.max_steps)
    progress = work / PROGRESS_FOLDER
    progress_callbacks = [ProgressReporter(progress, group.rank)] if progress.is_dir() else []
    prefetch_callbacks = [RowPrefetcher(rows, samples, recipe.batch_size, group)] if isinstance(rows, PackedRows) else []
    kind = PipelineTrainer if recipe.stages > 1 else ObjectiveTrainer
    trainer = kind(
        model=model,
        args=training_arguments(recipe, work, model, evaluate_on_resume=evaluates_first),
        train_dataset=OptionalRows(rows) if recipe.rows_per_step else rows,
        eval_dataset=material.rows["validation"],
        objective=material.objective,
        stop=ends.signal,
        processing_class=material.tokenizer,
        callbacks=[
            *checkpoint_callbacks,
            ends.signal,
            ends.divergence,
            ends.repeat,
            *tracking_callbacks,
            *usage_callbacks,
            *prefetch_callbacks,
            *progress_callbacks,
        ],
        checkpoints=course.checkpoints,
        facts={
            MADE_WITH_FACT: describe_recipe(recipe),
            DIVERGENCES_FACT: len(course.incidents.diverged),
            **({COMPILED_FACT: True} if compiled else {}),
        },
        samples=samples,
        metrics=metrics,
        meter=meter,
        divergence=ends.divergence,
        group=group,
        saves_sharded=saves_by_name(recipe),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_training(trainer: ObjectiveTrainer, course: RunState, store: Store, folder: str) -> None:
    """Train until the run is finished or interrupted.

    Raises:
        Restart: a step ran out of memory, or used a nondeterministic operation or a block that cannot be compiled.
    """
    try:
        trainer.train(resume_from_checkpoint=str(course.resume[1]) if course.resume else None)
        trainer.staging.close()
    except Exception as error:
        try:
            if trainer.metrics:  # also if the run fails for good: record its last metrics and its cost
                trainer.metrics.close(timeout=STOPPED_GRACE_SECONDS)
                write_usage(store, folder, trainer.meter.read(trainer.state))
            step = trainer.state.global_step + 1
            if restart := recover_from_error(error, course.incidents, store, course.uri, course.recipe, step):
                raise restart from error
            raise
        finally:
            # The error is recorded by now. The other processes wait for this one and would be ended after minutes. An upload
            # that is cut off would leave the checkpoint on this machine only until the next start.
            finish_checkpoint_writes(trainer, course)
            wait_for_uploads(course, resumes_later=True)


def finish_checkpoint_writes(trainer: ObjectiveTrainer, course: RunState) -> None:
    """Finish writing the newest checkpoint of a failed run.

    Errors are only logged, to keep the original error.
    """
    for finish in (trainer.staging.close, course.checkpoints.wait_for_commit):
        try:
            finish()
        except Exception as problem:
            log_line(f"the newest checkpoint is incomplete: {type(problem).__name__}: {' '.join(str(problem).split())}")


def publish_run(
    job: Job, course: RunState, material: RunInputs, trainer: ObjectiveTrainer, ends: StopCallbacks, store: Store, work: Path
) -> Result:
    """Publish the weights of a finished run. Raises Preempted or Restart if it will resume."""
    recipe = course.recipe
    usage = trainer.meter.read(trainer.state)
    ends_early = ends.signal.is_requested or ends.divergence.detected
    wait_for_uploads(course, resumes_later=bool(ends_early))
    grace = STOPPED_GRACE_SECONDS if ends_early else METRICS_GRACE_SECONDS
    unsent = trainer.metrics.close(timeout=grace) if trainer.metrics else []
    chosen = choose_weights(course, trainer, ends, store)
    course.checkpoints.free_disk_space(kept_step=chosen[0] if chosen else None)
    out = work / recipe.trained_role
    published = save_selected_weights(trainer, chosen, material.folder, recipe, out)
    if unsent:
        write_unsent_metrics(
            store, result_folder(job), (build_unsent_point(point, course.repeated_steps) for point in unsent)
        )
        log_line(f"{pluralize(len(unsent), 'metric point')} stored with the result: the tracking server did not answer")
    trained = publish_weights(out, material.tokenizer, store, job, material.base, recipe)
    usage = usage.model_copy(update={"gpu_seconds": trainer.meter.read(trainer.state).gpu_seconds})
    return Result(
        work_digest=job.work_digest,
        artifacts={trained.kind: trained, "base": material.base},
        metrics={"total_steps": float(trainer.state.global_step)},
        facts=training_facts(
            trainer,
            usage,
            read_recovery_log(store, course.uri),
            resumed_from=course.resume[0] if course.resume else None,
            published=published,
            unsent=len(unsent),
        ).model_dump(mode="json"),
    )


def build_unsent_point(point: Point, repeated_steps: Sequence[RepeatedSteps]) -> UnsentPoint:
    """Convert a metric point; marks those of repeated steps."""
    until = last_repeat_time(repeated_steps, point.step)
    return UnsentPoint(**vars(point), anew=until is not None, since=None if until == UNKNOWN_TIME else until)


def wait_for_uploads(course: RunState, *, resumes_later: bool) -> None:
    """Wait for uploads.

    Errors are only logged if the run resumes later, which needs local checkpoints only. An upload error must not replace the
    error that ended the run; the next start uploads again.
    """
    course.checkpoints.wait_for_commit()
    try:
        course.checkpoints.wait()
    except Exception as problem:
        if not resumes_later:
            raise
        log_line(
            f"{describe_newest_checkpoint(course.checkpoints)} is on this machine alone: {' '.join(str(problem).split())}"
        )


def describe_newest_checkpoint(checkpoints: CheckpointManager) -> str:
    """Name this machine's newest checkpoint, or its part of one that several machines save."""
    steps = checkpoints.local_steps()
    part = part_in_folder(checkpoints.folder / str(steps[0])) if steps else None
    return f"part {part.number} of {part.of} of the newest checkpoint" if part else "the newest checkpoint"


def choose_weights(
    course: RunState, trainer: ObjectiveTrainer, ends: StopCallbacks, store: Store
) -> tuple[int, Path] | None:
    """Return the checkpoint whose weights the run publishes; None for the final weights."""
    recipe, state = course.recipe, trainer.state
    if found := ends.divergence.detected:
        return roll_back(store, course.uri, recipe, course.checkpoints, trainer.samples, found, course.repeats)
    if ends.signal.is_requested and not is_finished(state, recipe):
        raise Preempted(describe_resume_point(course, state.global_step))
    if ends.repeat.reached and not is_finished(state, recipe):
        raise Restart(f"after step {state.global_step} the replayed run used smaller micro-batches")
    course.checkpoints.require_complete_parts()
    return course.checkpoints.best() if recipe.publish == "best" else None


def describe_resume_point(course: RunState, step: int) -> str:
    """Describe where a run that stopped after `step` will resume."""
    known = [*course.checkpoints.local_steps(), course.resume[0] if course.resume else 0]
    newest = max(saved for saved in known if saved <= step)
    if step and newest == step:
        return f"checkpoint {step} holds everything"
    return f"stopped after step {step}: resumes from {f'checkpoint {newest}' if newest else 'the beginning'}"


if __name__ == "__main__":
    main(train)
