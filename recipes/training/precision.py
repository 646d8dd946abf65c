"""Choose the dtype to compute in, and scale the loss of float16 models."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from recipes.contracts.recipe import Recipe
from recipes.runner import log_line

# In which type a model computes on this machine: the recipe's, or float32 where a processor has no instructions for it.
#
# A processor without them computes bfloat16 by conversion: a step of 135 million parameters took 120 s. The base model's
# weights are the same numbers in both; what is stored and served stays in the recipe's type.

REQUIRED_CPU_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "fphp"},
    "float32": None,
}
"""Flags of /proc/cpuinfo, of x86 and of ARM, one of which a type needs; float32 needs none."""
CPUINFO = Path("/proc/cpuinfo")


def select_compute_device() -> torch.device:
    """Where a model computes on this machine: on its GPU, if it has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def select_compute_dtype(dtype_name: str, device: torch.device | None = None) -> torch.dtype:
    """The type to compute in where a recipe wants that one; on that device, or on this machine's."""
    found: torch.dtype = getattr(torch, dtype_name)
    on_gpu = (device or select_compute_device()).type == "cuda"
    is_supported = on_gpu or cpu_supports_dtype(dtype_name, CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else "")
    return found if is_supported else torch.float32


def log_dtype_fallback(dtype_name: str) -> None:
    """Say so where a recipe's type is not the one that is computed in."""
    if select_compute_dtype(dtype_name) is not getattr(torch, dtype_name):
        log_line(f"this processor has no instructions for {dtype_name}: computing in float32")


def cpu_supports_dtype(dtype_name: str, cpuinfo: str) -> bool:
    """Whether a processor has instructions for a type, by what the kernel says of it."""
    needed = REQUIRED_CPU_FLAGS[dtype_name]
    flags = {
        flag for line in cpuinfo.splitlines() if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return needed is None or bool(needed & flags)


def loss_scale(recipe: Recipe) -> float:
    """As large as what the loss of a step is a mean over: its tokens, or its samples. 1 where nothing is in float16.

    Only the frozen weights below an adapter ever are (`Recipe.dtype`).
    """
    if select_compute_dtype(recipe.computing_dtype) is not torch.float16:
        return 1.0
    num_terms = recipe.samples_per_step * (recipe.sequence_length if recipe.objective == "sft" else 1)
    return float(2 ** int(math.log2(num_terms)))


def scale_gradient(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """The same loss, whose gradient is so many times as large."""
    return loss if scale == 1.0 else ScaledGradient.apply(loss, scale)  # type: ignore[no-untyped-call]


def unscale_gradients(parameters: Iterable[torch.nn.Parameter], scale: float) -> None:
    """Bring the gradients of what is trained back to their size, as they arrive: an adapter is in float32."""
    if scale != 1.0:
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / scale)  # type: ignore[no-untyped-call]


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.scale, None
