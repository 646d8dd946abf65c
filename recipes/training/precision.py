"""Choose the dtype to compute in, and scale the loss of float16 models."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from recipes.contracts.recipe import Recipe
from recipes.runner import log_line

# Compute dtype on this machine: the recipe's, or float32 where the CPU has no instructions for it.
#
# Without them a CPU emulates bfloat16 by conversion: a step of a 135M model took 120 s. The base model's weights have the
# same values in both; stored and served weights stay in the recipe's dtype.

REQUIRED_CPU_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "fphp"},
    "float32": None,
}
"""CPU flags in /proc/cpuinfo (x86 and ARM) of which a dtype needs at least one; None: always supported."""
CPUINFO = Path("/proc/cpuinfo")


def select_compute_device() -> torch.device:
    """Return this machine's compute device: its GPU if it has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def select_compute_dtype(dtype_name: str, device: torch.device | None = None) -> torch.dtype:
    """Return the compute dtype for a recipe's dtype on `device`, by default this machine's."""
    found: torch.dtype = getattr(torch, dtype_name)
    on_gpu = (device or select_compute_device()).type == "cuda"
    is_supported = on_gpu or cpu_supports_dtype(dtype_name, CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else "")
    return found if is_supported else torch.float32


def log_dtype_fallback(dtype_name: str) -> None:
    """Log it when the compute dtype differs from the recipe's."""
    if select_compute_dtype(dtype_name) is not getattr(torch, dtype_name):
        log_line(f"this processor has no instructions for {dtype_name}: computing in float32")


def cpu_supports_dtype(dtype_name: str, cpuinfo: str) -> bool:
    """Return whether a CPU has instructions for a dtype, from the text of /proc/cpuinfo."""
    needed = REQUIRED_CPU_FLAGS[dtype_name]
    flags = {
        flag for line in cpuinfo.splitlines() if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return needed is None or bool(needed & flags)


def loss_scale(recipe: Recipe) -> float:
    """Return the loss scale for float16: about the number of terms in a mean loss.

    The terms are a step's tokens or samples. For other dtypes the scale is 1. Only frozen weights under an adapter are ever
    float16 (`Recipe.dtype`).
    """
    if select_compute_dtype(recipe.computing_dtype) is not torch.float16:
        return 1.0
    num_terms = recipe.samples_per_step * (recipe.sequence_length if recipe.objective == "sft" else 1)
    return float(2 ** int(math.log2(num_terms)))


def scale_gradient(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the same loss with its gradient multiplied by `scale`."""
    return loss if scale == 1.0 else ScaledGradient.apply(loss, scale)  # type: ignore[no-untyped-call]


def unscale_gradients(parameters: Iterable[torch.nn.Parameter], scale: float) -> None:
    """Divide gradients by `scale` as they arrive: adapters have float32 gradients."""
    if scale != 1.0:
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / scale)  # type: ignore[no-untyped-call]


class ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.scale, None
