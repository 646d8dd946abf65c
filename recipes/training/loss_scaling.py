"""Scale the loss of float16 models so that small gradients do not underflow."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from recipes.contracts.recipe import Recipe
from recipes.training.precision import select_compute_dtype


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
