"""Estimate a job: steps, tokens, memory, hours and dollars, each with its source. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from recipes.contracts.job import BadConfiguration
from recipes.contracts.quantities import pluralize
from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture
from recipes.planning.hardware_fit import HardwareFit, checkpoint_bytes
from recipes.planning.memory_budget import trained_tensors
from recipes.planning.throughput import CPU_CORE_FLOPS, Range, assume_flops, assume_mfu
from resources.estimate.past_runs import PastRun, work_per_token

SINGLE_RUN_MARGIN = 0.30
"""How far a run may be from the only measured one: the load and the lengths of texts differ."""
MULTIPLE_RUNS_MARGIN = 0.10
"""How far a run may be beyond the slowest and the fastest of several."""
DEFAULT_OVERHEAD_SECONDS = Range(20.0, 120.0, 900.0)
"""Seconds of a job outside its steps, if not measured: from a small model on a laptop to 72 billion parameters from an
object store.
"""

COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER = 20
"""Tokens per parameter of compute-optimal training from scratch (Hoffmann et al. 2022)."""


@dataclass(frozen=True)
class DatasetTokens:
    """A version has `count` tokens in all its `records`; `source` says how that was determined."""

    count: int
    records: int
    source: str


@dataclass(frozen=True)
class Estimate:
    """The estimate of a job.

    `hours`, `dollars` and `memory` are None if too little is known; `notes` say why. `trained` is a number of parameters,
    `checkpoint` a number of bytes.
    """

    recipe: Recipe
    steps: int
    tokens: int
    trained: int | None
    dataset: DatasetTokens | None
    memory: HardwareFit | None
    checkpoint: int | None
    hours: Range | None
    dollars: Range | None
    gpus: int
    source: str
    past_runs: Sequence[PastRun]
    notes: Sequence[str]

    @property
    def epochs(self) -> float | None:
        """The maximum number of times that a token is seen.

        Rows of packed texts have some padding. Pairs are not packed.
        """
        if self.recipe.has_pairs and self.dataset and self.dataset.records:
            return self.steps * self.recipe.samples_per_step / self.dataset.records
        return self.tokens / self.dataset.count if self.dataset and self.dataset.count else None

    @property
    def tokens_per_parameter(self) -> float | None:
        """Tokens per trained parameter."""
        return self.tokens / self.trained if self.trained else None


def estimate_job(
    recipe: Recipe,
    shape: Architecture | None,
    *,
    memory: HardwareFit | None,
    dataset: DatasetTokens | None,
    past: Sequence[PastRun],
    prices: Mapping[str, float],
    notes: Sequence[str] = (),
) -> Estimate:
    """Combine what is known about a job.

    `prices` are in dollars per hour, by GPU type.
    """
    remarks = list(notes)
    tokens, max_tokens = total_tokens(recipe, dataset), recipe.tokens_per_step * recipe.max_steps
    if recipe.has_pairs:
        remarks.append(f"tokens: {describe_pair_tokens(recipe, dataset)}")
    if memory is None:
        remarks.append("memory: the base model's shape is unknown until the first job has stored it")
    speed, source = expected_speed(recipe, shape, past)
    if speed is None:
        remarks.append(f"hours: no past run, and {source}")
    work = work_per_token(recipe, shape)
    # The measured speeds include the runs' padding; without a run, padding may be up to sequence_length.
    hours = estimate_hours(tokens * work, tokens * work if past else max_tokens * work, speed, past) if speed else None
    gpus = recipe.hardware.gpus * (recipe.distributed.num_nodes if recipe.distributed else 1)
    price = prices.get(recipe.hardware.gpu_type or "") if gpus else 0.0
    if price is None:
        remarks.append(f"dollars: add the price of {recipe.hardware.gpu_type} to prices.gpu_hour in config.yaml")
    dollars = scale_range(hours, gpus * price) if hours and price is not None else None
    return Estimate(
        recipe=recipe,
        steps=recipe.max_steps,
        tokens=tokens,
        trained=count_trained_parameters(recipe, shape),
        dataset=dataset,
        memory=memory,
        checkpoint=checkpoint_bytes(recipe, shape) if shape and memory else None,
        hours=hours,
        dollars=dollars,
        gpus=gpus,
        source=source,
        past_runs=past,
        notes=remarks,
    )


def total_tokens(recipe: Recipe, dataset: DatasetTokens | None) -> int:
    """Return the tokens of all steps. Packed rows have one length.

    A pair is at most two rows of that length.
    """
    max_tokens = recipe.tokens_per_step * recipe.max_steps
    if not recipe.has_pairs or not dataset or not dataset.records:
        return max_tokens
    return min(max_tokens, round(dataset.count / dataset.records * recipe.samples_per_step * recipe.max_steps))


def describe_pair_tokens(recipe: Recipe, dataset: DatasetTokens | None) -> str:
    if not dataset or not dataset.records:
        return f"at most, as if each answer had all of sequence_length {recipe.sequence_length}: no dataset says more"
    mean = dataset.count / dataset.records
    return f"pairs are not packed, and have {mean:,.0f} on average, prompts twice; a micro-batch is padded to its longest"


def count_trained_parameters(recipe: Recipe, shape: Architecture | None) -> int | None:
    """Return the number of trained parameters, those of an adapter included.

    None if too little is known.
    """
    try:
        return sum(tensors.total for tensors in trained_tensors(recipe, shape)) if shape else None
    except BadConfiguration:  # an adapter on an unknown module
        return None


def expected_speed(recipe: Recipe, shape: Architecture | None, past: Sequence[PastRun]) -> tuple[Range | None, str]:
    """Return the work per second, in units of `past_runs.work_per_token`, and its source."""
    if past:
        found = [run.speed for run in past]
        margin = MULTIPLE_RUNS_MARGIN if len(found) > 1 else SINGLE_RUN_MARGIN
        speed = Range(min(found) * (1 - margin), median(found), max(found) * (1 + margin))
        return speed, f"measured: {pluralize(len(found), 'past run')} of this recipe on this hardware"
    if shape is None:
        return None, "the base model's shape is unknown"
    assumed = assume_flops(recipe)
    if assumed is None:
        return None, f"the speed of {recipe.hardware.gpu_type or 'this GPU'} is unknown"
    return assumed, f"assumed: no past run of this recipe on this hardware; {describe_assumption(recipe)}"


def describe_assumption(recipe: Recipe) -> str:
    if recipe.hardware.gpus:
        share = assume_mfu(recipe)
        return f"{share.low:.0%} to {share.high:.0%} of the GPU's peak"
    return f"{CPU_CORE_FLOPS.low / 1e9:.0f} to {CPU_CORE_FLOPS.high / 1e9:.0f} billion operations a second of a core"


def estimate_hours(work: float, max_tokens: float, speed: Range, past: Sequence[PastRun]) -> Range:
    """Return the hours for `work`, or at most `max_tokens`.

    The steps, and what a job needs outside of them.
    """
    measured = [run.overhead_seconds for run in past if run.overhead_seconds is not None]
    around = Range(min(measured), median(measured), max(measured)) if measured else DEFAULT_OVERHEAD_SECONDS
    return Range(
        low=(work / speed.high + around.low) / 3600,
        likely=(work / speed.likely + around.likely) / 3600,
        high=(max_tokens / speed.low + around.high) / 3600,
    )


def scale_range(found: Range, factor: float) -> Range:
    return Range(found.low * factor, found.likely * factor, found.high * factor)
