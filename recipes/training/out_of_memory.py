"""Memory that ran out inside a step: how it is recognized, and the next smaller micro-batch of the same effective batch."""

import re

import torch

from recipes.incidents import MOST, Incidents, OutOfMemory, words_of
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration

WORDS = re.compile(
    "DefaultCPUAllocator: can't allocate memory|CUDA out of memory|CUDA (driver )?error: out of memory"
    "|Cuda failure ([0-9]+ )?'out of memory'|Failed to CUDA calloc|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|Triton Error \[CUDA\]: out of memory",
    re.IGNORECASE,
)
"""PyTorch has a class of its own for its caching allocator on GPUs alone; of the CPU, the CUDA driver, NCCL, cuBLAS, cuDNN
and Triton, and of the allocator while something is compiled, it raises others, with these words. Of NCCL it tells no more
than the last of several: since 2.20 with the number of the error, or that of the allocation."""


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or WORDS.search(str(error)) is not None


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
