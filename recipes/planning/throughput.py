"""FLOPs per token, and expected throughput without measurements. Pure functions.

FLOPs are counted as in PaLM (Chowdhery et al. 2022, appendix B): two per weight of a matrix in the forward pass, twice that
in the backward pass, plus attention over the sequence.
"""

from dataclasses import dataclass

from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture
from recipes.planning.gpus import find_gpu
from recipes.planning.memory_budget import compiles_blocks
from recipes.planning.parallel_layout import pipeline_efficiency


@dataclass(frozen=True)
class Range:
    """An estimate with its expected bounds."""

    low: float
    likely: float
    high: float


MFU = Range(0.12, 0.28, 0.50)
"""Share of a GPU's peak in fine-tuning. Published: 0.17 (70B LoRA on 8 H100, NeMo Automodel), 0.20 to 0.35 (7B LoRA on an
A100, LLaMA-Factory), 0.30 to 0.35 (8B full on 8 H100, torchtitan); the bounds have a margin on both sides."""
MFU_COMPILED = Range(0.15, 0.45, 0.60)
"""The same with compiled blocks. Measured on an H200, 7B LoRA in rows of 2,048 tokens: 0.50 to 0.53; 0.42 with an adapter in
float32, as next to float16; 0.56 with checkpointing, where recomputation counts as work here."""
CPU_CORE_FLOPS = Range(5e9, 40e9, 150e9)
"""FLOP/s of one CPU core: 46e9 were measured on a LoRA run of 135 million parameters on two cores."""
SCALING_EFFICIENCY = 0.9
"""Share of a process's speed that remains in a distributed run, where it waits for others at every step."""


def estimate_flops_per_token(recipe: Recipe, shape: Architecture, *, recomputed: bool = True) -> float:
    """Return the training FLOPs per token: forward, backward and, unless excluded, recomputation for checkpointing.

    Recomputation takes time, but MFU excludes it. A frozen weight needs no gradient, so its backward pass costs as much as
    the forward pass instead of twice. Every token of a packed row, including padding, counts as one of a sequence of the
    row's length; the forward pass of DPO's reference is excluded.
    """
    head = shape.vocab_size * shape.hidden_size
    matrices = head + shape.num_hidden_layers * sum(t.total for t in shape.block_tensors if t.projection)
    # Each token attends to half of the sequence on average: two products of query_width x length / 2, two FLOPs each.
    attention = 2 * shape.num_hidden_layers * shape.query_width * recipe.sequence_length
    forward = 2 * matrices + attention
    again = forward - 2 * head if recipe.gradient_checkpointing and recomputed else 0
    if recipe.method == "full":
        return 3 * forward + again
    adapter = 6 * sum(t.total for t in shape.adapter(recipe.lora_rank, recipe.lora_target_modules))
    return 2 * 2 * matrices + 3 * attention + adapter + again


def assume_mfu(recipe: Recipe) -> Range:
    """Return the expected share of a GPU's peak."""
    return MFU_COMPILED if compiles_blocks(recipe) and recipe.computing_dtype != "float32" else MFU


def assume_flops(recipe: Recipe) -> Range | None:
    """Return the expected FLOP/s of all processes together, or None for unknown GPUs."""
    processes = recipe.processes
    share = (1.0 if processes == 1 else SCALING_EFFICIENCY) * pipeline_efficiency(recipe)
    if recipe.hardware.gpus == 0:
        cores = recipe.hardware.cpu or 1
        return Range(*(cores * share * value for value in (CPU_CORE_FLOPS.low, CPU_CORE_FLOPS.likely, CPU_CORE_FLOPS.high)))
    gpu = find_gpu(recipe.hardware.gpu_type)
    if gpu is None:
        return None
    mfu = assume_mfu(recipe)
    return Range(*(processes * share * gpu.flops * value for value in (mfu.low, mfu.likely, mfu.high)))
