"""The next smaller micro-batch of the same effective batch, after a step ran out of memory."""

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import MOST, Incidents, OutOfMemory, words_of


def smaller(recipe: Recipe, incidents: Incidents, step: int | None) -> OutOfMemory:
    """What to go on with after `step` did not fit with `recipe`: half the micro-batch, twice the accumulation.

    No `step`: nobody knows which. Where half is no whole divisor of the effective batch, the next smaller one that is.

    Raises:
        BadConfiguration: there is no smaller micro-batch, or it was made smaller often enough.
    """
    what = f"{words_of(step)} does not fit into memory with batch_size {recipe.batch_size}"
    advice = "give a shorter sequence_length, gradient_checkpointing: true, method qlora, or hardware with more memory"
    if recipe.batch_size == 1:
        raise BadConfiguration(f"{what}, and there is no smaller one: {advice}")
    half = recipe.in_batches_of(recipe.batch_size // 2)
    found = OutOfMemory(step=step, batch_size=half.batch_size, gradient_accumulation=half.gradient_accumulation)
    # Another process of the run, which has the same step on another GPU, may have written it down a moment ago.
    if len(incidents.out_of_memory) >= MOST and found not in incidents.entries:
        raise BadConfiguration(f"{what}, after it was made smaller {MOST} times: {advice}")
    return found
