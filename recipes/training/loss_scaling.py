"""Gradients of what computes in float16, which knows nothing below 6e-8: those of a step's mean over 32,768 tokens are, and
an adapter stayed as it was, without an error (Micikevicius et al. 2018, section 3.2; row H7).

They are scaled on their way through the model by a power of two: no digit changes by it, there is no state to save, and no
step is left out. One that grows beyond 65,504 is infinite, which ends as a divergence does.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from recipes.contracts.recipe import Recipe
from recipes.training.precision import computing_dtype


def scale_of(recipe: Recipe) -> float:
    """As large as what the loss of a step is a mean over: its tokens, or its samples. 1 where nothing is in float16.

    Only the frozen weights below an adapter ever are (`Recipe.dtype`).
    """
    if computing_dtype(recipe.computing_dtype) is not torch.float16:
        return 1.0
    places = recipe.samples_per_step * (recipe.sequence_length if recipe.objective == "sft" else 1)
    return float(2 ** int(math.log2(places)))


def scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """The same loss, whose gradient is so many times as large."""
    return loss if scale == 1.0 else ScaledGradient.apply(loss, scale)  # type: ignore[no-untyped-call]


def unscale(parameters: Iterable[torch.nn.Parameter], scale: float) -> None:
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
