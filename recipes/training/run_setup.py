"""Prepare a training run: parameters, processes, checkpoint to resume from, and inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hanzo_ml.client.repeated_steps import RepeatedSteps
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import NodeShard
from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import BadConfiguration, Job
from recipes.contracts.quantities import pluralize
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import RecoveryEvent, RecoveryLog, read_recovery_log
from recipes.contracts.rewind import Rewind
from recipes.export import base_model
from recipes.planning.parallel_layout import fetches_own_shard, zero_stage
from recipes.planning.recipe_checks import check_sequence_length, check_supported
from recipes.runner import log_line
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.checkpointing.resume_point import agree_on_checkpoint, check_checkpoint_fits
from recipes.training.objectives import make_objective
from recipes.training.objectives.objective import Objective, Rows, check_rows
from recipes.training.parallel.process_group import ProcessGroup, join_process_group
from recipes.training.precision import log_dtype_fallback
from recipes.training.recovery import discard_diverged_checkpoints, update_incidents


class TrainParameters(FrozenModel):
    """Parameters of a training job.

    Attributes:
        repeats: recovery events of the run that this job replays; empty if it is no replay.
        sent_back: rewinds that the run's user requested, oldest first.
    """

    recipe: Recipe
    repeats: tuple[RecoveryEvent, ...] = ()
    sent_back: tuple[Rewind, ...] = ()


# Hardware requirements of a recipe, checked before anything is loaded.


def check_hardware(recipe: Recipe) -> None:
    """Check that this machine has what the recipe needs.

    Raises:
        BadConfiguration: a GPU or DeepSpeed is missing.
    """
    # On a CPU bitsandbytes 0.50 silently uses the unpaged optimizer, with only a warning.
    if recipe.optimizer == "paged_adamw" and not torch.cuda.is_available():
        raise BadConfiguration(
            f"recipe '{recipe.name}': optimizer paged_adamw moves pages between a GPU and the host, and there is no GPU "
            "here: use adamw or adamw_8bit"
        )
    if zero_stage(recipe) and find_spec("deepspeed") is None:
        raise BadConfiguration(
            f"recipe '{recipe.name}': DeepSpeed is not installed here: pip install \"hanzo-ml[deepspeed]\", or use strategy "
            "fsdp, which shards as much"
        )


def warn_without_gpu(recipe: Recipe) -> None:
    """Log a warning if the recipe wants GPUs and PyTorch finds none.

    Training continues on the CPU; users whose GPU driver fails must see why it is slow.
    """
    if recipe.hardware.gpus and not torch.cuda.is_available():
        num_gpus = pluralize(recipe.hardware.gpus, "GPU")
        log_line(f"the recipe asks for {num_gpus}, and PyTorch finds none here: training on the processor")


# Inputs on this machine: the base model's files, its tokenizer, and the rows of both splits.

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class RunInputs:
    """A run's inputs: `folder` holds the files of `base`, `rows` the rows by split."""

    base: Artifact
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    rows: Mapping[str, Rows]


def load_inputs(job: Job, recipe: Recipe, group: ProcessGroup, store: Store) -> RunInputs:
    """Fetch the base model and load tokenizer, objective and rows.

    Raises:
        BadConfiguration: the base model or the data differ from the recipe, or do not fit it.
    """
    cache = Path(job.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    with group.local_leader_first():
        base = base_model.resolve_base_model(recipe.base_model, store, cache)
        # Only one process hashes the base model (144 GB for 72B) while the others wait. Rows are hashed by the one that
        # builds them.
        folder = store.fetch(base, cache) if group.local_rank == 0 else store.locate_fetched(base, cache)
        for split in SPLITS if group.local_rank == 0 and group.local_size > 1 else ():
            store.fetch(job.inputs[split], cache)
    check_sequence_length(recipe, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    objective = make_objective(recipe)
    objective.rendering = job.rendering
    rows = {split: load_rows(split, job, objective, tokenizer, store) for split in SPLITS}
    return RunInputs(base, folder, tokenizer, objective, rows)


def load_rows(split: str, job: Job, objective: Objective, tokenizer: PreTrainedTokenizerBase, store: Store) -> Rows:
    try:
        return check_rows(objective, objective.rows(job.inputs[split], store, Path(job.cache_dir), tokenizer))
    except BadConfiguration as problem:
        raise BadConfiguration(f"the {split} split: {problem}") from None


# The state of a run at the start of a process: recipe, process group, and checkpoint to resume from.


@dataclass(frozen=True)
class RunState:
    """State from which this process starts or resumes the run.

    Attributes:
        recipe: the job's recipe, for the current number of processes and with a micro-batch that fits into memory.
        uri: where the run's checkpoints are stored.
        resume: step and folder of the checkpoint to resume from; None at the start of a run.
        incidents: the run's recovery events so far.
        repeats: recovery events of the replayed run.
        sent_back: rewinds that the run's user requested.
    """

    recipe: Recipe
    group: ProcessGroup
    checkpoints: CheckpointManager
    uri: str
    resume: tuple[int, Path] | None
    incidents: RecoveryLog
    repeats: tuple[RecoveryEvent, ...]
    sent_back: tuple[Rewind, ...]

    @property
    def repeated_steps(self) -> tuple[RepeatedSteps, ...]:
        """Steps whose logged metrics belong to weights that the run has discarded."""
        healed = self.incidents.without(self.repeats).repeated_steps
        sent = ((back.repeated_steps, back.at) for back in self.sent_back)
        return tuple(RepeatedSteps.from_time(steps, at) for steps, at in (*healed, *sent))


def node_share(recipe: Recipe, group: ProcessGroup) -> NodeShard | None:
    """Return the shard of a checkpoint that this node fetches; None means all of it."""
    return (
        NodeShard(group.node + 1, group.nodes, group.local_size) if group.nodes > 1 and fetches_own_shard(recipe) else None
    )


def prepare_run(job: Job, store: Store, work: Path) -> RunState:
    """Join the process group, choose the checkpoint and apply recorded recoveries.

    Raises:
        BadConfiguration: the recipe cannot be trained on this machine, or does not fit the run's checkpoint.
    """
    parameters = TrainParameters.model_validate(job.parameters)
    recipe = parameters.recipe
    check_supported(recipe)
    check_hardware(recipe)
    group = join_process_group(job.distributed)
    if group.is_leader:
        warn_without_gpu(recipe)
        log_dtype_fallback(recipe.computing_dtype)
    recipe = recipe.for_processes(group.size)
    group.model_parallel_size, group.is_pipelined = recipe.model_parallel_size, recipe.is_pipelined
    policy, uri = job.checkpoint, job.outputs["checkpoints"]
    share = node_share(recipe, group)
    checkpoints = CheckpointManager(work / "checkpoints", store, uri, policy.keep_last, policy.compression, share=share)
    known = group.broadcast(read_recovery_log(store, uri) if group.is_leader else RecoveryLog())
    if group.local_rank == 0:
        discard_diverged_checkpoints(checkpoints.folder, known.diverged)
    checkpoints, resume = agree_on_checkpoint(checkpoints, policy.resume_from, parameters.sent_back, group)
    if resume:
        check_checkpoint_fits(resume, recipe)
    if group.is_leader:
        checkpoints.upload_missing()
    done, repeats = resume[0] if resume else 0, parameters.repeats
    found = (
        update_incidents(known, store, uri, recipe, work, done=done, repeats=repeats) if group.is_leader else RecoveryLog()
    )
    incidents = group.broadcast(found)
    return RunState(
        incidents.shrink_recipe(recipe), group, checkpoints, uri, resume, incidents, repeats, parameters.sent_back
    )
