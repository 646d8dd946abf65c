"""Variable-length FlashAttention over packed rows, without a mask."""

from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from recipes.contracts.recipe import Recipe
from recipes.planning.gpus import FLASH_ATTENTION_HEAD_SIZES
from recipes.planning.parallel_layout import computes_whole_blocks
from recipes.training.precision import select_compute_dtype

ATTENTION_NAME = "packed"
BOUNDARIES_KEY = "cu_seq_lens_q"
"""Where each example begins, and the end of the last: int32 [examples + 1]. The name is that of transformers."""
SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Whose attention is nothing but causal, within a window or not: no sinks, no cap on the logits."""
MIN_COMPUTE_CAPABILITY = (8, 0)
"""Compute capability from which FlashAttention runs."""


def use_packed_attention_if_supported(model: PreTrainedModel, recipe: Recipe) -> None:
    """`use_packed_attention`, if a model of that recipe can on this machine."""
    if computes_whole_blocks(recipe) and supports_packed_attention(
        model.config, select_compute_dtype(recipe.computing_dtype)
    ):
        use_packed_attention(model)


def supports_packed_attention(config: PretrainedConfig, dtype: torch.dtype) -> bool:
    """Whether a model that computes in `dtype` on this machine can attend so."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= MIN_COMPUTE_CAPABILITY
        and dtype in (torch.bfloat16, torch.float16)
        and config.model_type in SUPPORTED_ARCHITECTURES
        and head in FLASH_ATTENTION_HEAD_SIZES
        and not config.attention_dropout
    )


def use_packed_attention(model: PreTrainedModel) -> None:
    """From now on. Rows are packed, or padded behind: nothing that is not in an example's past is seen.

    No mask is registered beside it, not even one of nothing: transformers would look whether rows are packed, and wait for
    the GPU to say.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model.set_attn_implementation(ATTENTION_NAME)
    model.get_decoder().register_forward_pre_hook(pass_boundaries, with_kwargs=True)


def uses_packed_attention(config: PretrainedConfig) -> bool:
    """Whether the model of that configuration was told to."""
    return bool(config._attn_implementation == ATTENTION_NAME)


def add_boundaries(batch: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch that is still on the host, with where its examples end: counted on the GPU, the host would have to wait
    for all that is under way there, before each micro-batch.
    """
    return batch | {BOUNDARIES_KEY: example_boundaries(batch["position_ids"])} if "position_ids" in batch else batch


def pass_boundaries(decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    found = kwargs.get(BOUNDARIES_KEY)
    if found is None and kwargs.get("position_ids") is None:
        found = row_boundaries(kwargs["input_ids"])
    elif found is None:  # an objective of its own has not passed on what its micro-batch holds
        found = example_boundaries(kwargs["position_ids"])
    # One program for any number of examples, from the first on: else each number had its own.
    torch._dynamo.mark_dynamic(found, 0)
    return args, kwargs | {BOUNDARIES_KEY: found}


def example_boundaries(positions: torch.Tensor) -> torch.Tensor:
    """Of examples in rows [rows, length], by their tokens' positions, which begin at 0 in each."""
    starts = (positions.flatten() == 0).nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)


def row_boundaries(tokens: torch.Tensor) -> torch.Tensor:
    """Of rows [rows, length] with one example each, and padding behind it, which it does not see."""
    rows, length = tokens.shape
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=tokens.device)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Of tensors [rows, heads, length, head size]; the result is [rows, length, heads, head size]."""
    rows, heads, length, _head = query.shape
    # Under autocast the rotation leaves what it turns in float32.
    q, k, v = (part.transpose(1, 2).flatten(0, 1).to(value.dtype) for part in (query, key, value))
    found: Any = varlen_attn(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_q,
        length,  # at most, whatever the rows hold: a number that changes were another program to compile
        length,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=k.shape[1] != heads,
    )
    return found.unflatten(0, (rows, length)), None
