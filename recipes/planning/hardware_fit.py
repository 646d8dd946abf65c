"""Check whether a recipe fits GPU memory, host memory and disks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from recipes.contracts.quantities import parse_bytes
from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture
from recipes.planning.gpus import GIB, find_gpu
from recipes.planning.memory_budget import (
    DTYPE_BYTES,
    TRAINED_DTYPE,
    MemoryBudget,
    estimate_memory,
    optimizer_bytes,
    paged_optimizer_bytes,
    trained_tensors,
)
from recipes.planning.parallel_layout import fetches_own_shard, saves_parts

# Whether a recipe fits the memory of its hardware, and suggestions if it does not. Pure functions.

MIB = 1024**2
METHODS_BY_MEMORY = ("full", "lora", "qlora")
"""Methods in decreasing order of memory use."""


@dataclass(frozen=True)
class HardwareFit:
    """Bytes needed and available on a GPU or the host.

    `available` is None for unknown hardware. Of each GPU's state, `paged` bytes move to the host on demand, which has `room`
    for them if known.
    """

    budget: MemoryBudget
    needed: float
    available: float | None
    fits: bool
    where: str
    paged: float = 0.0
    room: float | None = None

    @property
    def message(self) -> str:
        if self.available is None:
            return f"needs {format_bytes(self.needed)} on {self.where}, whose memory is unknown"
        host_note = (
            f", and {format_bytes(self.paged)} there or in the {format_bytes(self.room)} that hardware.memory has for each"
            if self.room
            else ""
        )
        return f"needs {format_bytes(self.needed)} of the {format_bytes(self.available)} on {self.where}{host_note}"


def check_fit(recipe: Recipe, shape: Architecture, host_memory: int) -> HardwareFit:
    """Compare a recipe's memory budget with its hardware.

    On GPUs the budget including allowances must fit into each one. Without GPUs, the available memory is the larger of the
    recipe's and `host_memory`, this machine's bytes; allowances are left out, so that nothing is rejected that could run.

    Raises:
        BadConfiguration: an adapter target is no module of this model.
    """
    budget = estimate_memory(recipe, shape)
    gpu_type = recipe.hardware.gpu_type
    if recipe.hardware.gpus:
        gpu = find_gpu(gpu_type)
        available = gpu.memory if gpu else None
        paged, asked = paged_optimizer_bytes(recipe, shape), recipe.hardware.memory
        room = parse_bytes(asked) / recipe.hardware.gpus if paged and asked else None
        fits = available is None or (
            budget.needed <= available and (room is None or budget.needed + paged <= available + room)
        )
        return HardwareFit(budget, budget.needed, available, fits, f"each {gpu_type or 'GPU'}", paged, room)
    processes = recipe.distributed.gpus_per_node if recipe.distributed else 1
    room = max(parse_bytes(recipe.hardware.memory or "0"), host_memory)
    return HardwareFit(budget, budget.needed * processes, room, budget.certain * processes <= room, "the host")


@dataclass(frozen=True)
class Alternative:
    """A recipe that fits, with the parameters that a job must change."""

    recipe: Recipe
    parameters: dict[str, int]
    message: str


def find_alternative(recipe: Recipe, shape: Architecture, others: Iterable[Recipe], host_memory: int) -> Alternative | None:
    """Suggest an alternative to a recipe that does not fit, with the smallest change first.

    The same recipe with a smaller micro-batch and the same effective batch; then another recipe of the same base model and
    objective on the requested hardware; then one on its own hardware.
    """
    known = [
        other for other in others if (other.base_model.uri, other.objective) == (recipe.base_model.uri, recipe.objective)
    ]
    known.sort(
        key=lambda other: (
            abs(METHODS_BY_MEMORY.index(other.method) - METHODS_BY_MEMORY.index(recipe.method)),
            other.processes,
        )
    )
    for found in (*suggest_smaller_batches(recipe), *suggest_other_methods(recipe, known), *suggest_other_hardware(known)):
        if check_fit(found.recipe, shape, host_memory).fits:
            return found
    return None


def suggest_smaller_batches(recipe: Recipe) -> Iterator[Alternative]:
    for rows in range(recipe.batch_size // 2, 0, -1):
        if recipe.batch_size % rows:
            continue
        smaller = recipe.with_max_batch_size(rows)
        times = smaller.gradient_accumulation
        parameters = {"batch_size": rows, "gradient_accumulation": times}
        words = f"batch_size {rows} with gradient_accumulation {times}, which is the same effective batch"
        yield Alternative(smaller, parameters, words)


def suggest_other_methods(recipe: Recipe, others: Iterable[Recipe]) -> Iterator[Alternative]:
    asked = recipe.model_dump(mode="json", include={"hardware", "distributed"})
    for other in others:
        if other.method != recipe.method:
            yield Alternative(other.changed(asked), {}, f"recipe '{other.name}', which fits {describe_hardware(recipe)}")


def suggest_other_hardware(others: Iterable[Recipe]) -> Iterator[Alternative]:
    for other in others:
        yield Alternative(other, {}, f"recipe '{other.name}' on {describe_hardware(other)}")


def describe_hardware(recipe: Recipe) -> str:
    """Format the hardware of all nodes, such as `8 x nvidia-a100-80gb`; `the CPU` without GPUs."""
    nodes = recipe.distributed.num_nodes if recipe.distributed else 1
    return f"{recipe.hardware.gpus * nodes} x {recipe.hardware.gpu_type or 'GPU'}" if recipe.hardware.gpus else "the CPU"


def format_bytes(size: float) -> str:
    """Format a size, such as `1.9 GiB` or `18.6 MiB`.

    Adapters below a GiB were once shown as `0.0 GiB`.
    """
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


# Estimated size of a checkpoint in bytes. Pure functions.
#
# Excludes what is never large: schedule, random states, the tokenizer's files.


def checkpoint_bytes(recipe: Recipe, shape: Architecture) -> int:
    """Return the size of trained weights and optimizer state, independent of the number of processes.

    Raises:
        BadConfiguration: an adapter target is no module of this model.
    """
    trained = trained_tensors(recipe, shape)
    # independent of their location during training
    kept = "adamw" if recipe.optimizer == "paged_adamw" else recipe.optimizer
    weights = sum(tensors.total for tensors in trained) * DTYPE_BYTES[TRAINED_DTYPE]
    return weights + optimizer_bytes(kept, trained, DTYPE_BYTES[TRAINED_DTYPE])


def describe_disk_usage(recipe: Recipe, size: int) -> str:
    """Describe the disk space for checkpoints: the newest, the one being written, and compressed copies.

    If each node saves a part, a resuming node fetches its shard, or everything.
    """
    nodes = recipe.distributed.num_nodes if recipe.distributed else 1
    here, policy = "three" if recipe.checkpoint.compression else "two", recipe.checkpoint
    store = f"the store up to {policy.keep_last + 2}"
    if nodes > 1 and saves_parts(recipe):
        more = (
            "the first node's also all weights at the end"
            if fetches_own_shard(recipe)
            else "and a complete one to resume from"
        )
        disks = f"each node's disk must hold {here} parts of {format_bytes(size / nodes)} ({more})"
        return f"{format_bytes(size)} a checkpoint; {disks}, {store} checkpoints"
    where = "the first node's disk" if nodes > 1 else "the disk"
    return f"{format_bytes(size)} a checkpoint; {where} must hold {here} of them, {store}"
