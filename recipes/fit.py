"""Whether a recipe fits the memory of its hardware, and what would, where it does not (row L8). Pure functions."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture
from recipes.planning.gpus import GIB, gpu_named
from recipes.planning.memory_budget import MemoryBudget, memory_budget, paged_bytes
from recipes.quantity import bytes_of

MIB = 1024**2
METHODS = ("full", "lora", "qlora")
"""From the one that needs most memory to the one that needs least."""


@dataclass(frozen=True)
class Fit:
    """Bytes needed and there, on one GPU or of the host; `available` is none where nothing is known of the hardware.

    `paged` bytes of each GPU move to the host as they must, where it has `room` for them, if that is known.
    """

    budget: MemoryBudget
    needed: float
    available: float | None
    fits: bool
    where: str
    paged: float = 0.0
    room: float | None = None

    @property
    def words(self) -> str:
        if self.available is None:
            return f"needs {sized(self.needed)} on {self.where}, whose memory is not known"
        beside = (
            f", and {sized(self.paged)} there or of the {sized(self.room)} that hardware.memory has for each"
            if self.room
            else ""
        )
        return f"needs {sized(self.needed)} of the {sized(self.available)} on {self.where}{beside}"


def fit(recipe: Recipe, shape: Architecture, host_memory: int) -> Fit:
    """Compare a recipe's budget with its hardware.

    On GPUs the budget with its allowances must fit into each. Without GPUs the host's memory counts: that is the larger of
    what the recipe asks for and `host_memory`, the bytes of this machine; allowances are left out, so that nothing is
    refused that could run.

    Raises:
        BadConfiguration: an adapter's target is no module of this model.
    """
    budget = memory_budget(recipe, shape)
    gpu_type = recipe.hardware.gpu_type
    if recipe.hardware.gpus:
        gpu = gpu_named(gpu_type)
        available = gpu.memory if gpu else None
        paged, asked = paged_bytes(recipe, shape), recipe.hardware.memory
        room = bytes_of(asked) / recipe.hardware.gpus if paged and asked else None
        fits = available is None or (
            budget.needed <= available and (room is None or budget.needed + paged <= available + room)
        )
        return Fit(budget, budget.needed, available, fits, f"each {gpu_type or 'GPU'}", paged, room)
    processes = recipe.distributed.gpus_per_node if recipe.distributed else 1
    room = max(bytes_of(recipe.hardware.memory or "0"), host_memory)
    return Fit(budget, budget.needed * processes, room, budget.certain * processes <= room, "the host")


@dataclass(frozen=True)
class Alternative:
    """A recipe that fits, with the parameters that a job must change for it."""

    recipe: Recipe
    parameters: dict[str, int]
    words: str


def nearest(recipe: Recipe, shape: Architecture, others: Iterable[Recipe], host_memory: int) -> Alternative | None:
    """What to run instead of a recipe that does not fit: the first that does, the least changed first.

    The same recipe with a smaller micro-batch and the same effective one; then another recipe of the same base model and
    objective on the hardware that was asked for; then one on hardware of its own.
    """
    known = [
        other for other in others if (other.base_model.uri, other.objective) == (recipe.base_model.uri, recipe.objective)
    ]
    known.sort(key=lambda other: (abs(METHODS.index(other.method) - METHODS.index(recipe.method)), other.processes))
    for found in (*smaller_batches(recipe), *on_hardware_of(recipe, known), *on_their_own(known)):
        if fit(found.recipe, shape, host_memory).fits:
            return found
    return None


def smaller_batches(recipe: Recipe) -> Iterator[Alternative]:
    for rows in range(recipe.batch_size // 2, 0, -1):
        if recipe.batch_size % rows:
            continue
        smaller = recipe.in_batches_of(rows)
        times = smaller.gradient_accumulation
        parameters = {"batch_size": rows, "gradient_accumulation": times}
        words = f"batch_size {rows} with gradient_accumulation {times}, which is the same effective batch"
        yield Alternative(smaller, parameters, words)


def on_hardware_of(recipe: Recipe, others: Iterable[Recipe]) -> Iterator[Alternative]:
    asked = recipe.model_dump(mode="json", include={"hardware", "distributed"})
    for other in others:
        if other.method != recipe.method:
            yield Alternative(other.changed(asked), {}, f"recipe '{other.name}', which fits {hardware_words(recipe)}")


def on_their_own(others: Iterable[Recipe]) -> Iterator[Alternative]:
    for other in others:
        yield Alternative(other, {}, f"recipe '{other.name}' on {hardware_words(other)}")


def hardware_words(recipe: Recipe) -> str:
    """`8 x nvidia-a100-80gb`, of all nodes; `the CPU` without GPUs."""
    nodes = recipe.distributed.num_nodes if recipe.distributed else 1
    return f"{recipe.hardware.gpus * nodes} x {recipe.hardware.gpu_type or 'GPU'}" if recipe.hardware.gpus else "the CPU"


def sized(size: float) -> str:
    """`1.9 GiB`; `18.6 MiB` of what is less than one: an adapter was said to take `0.0 GiB`."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
