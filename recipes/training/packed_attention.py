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
"""Start offset of each example, and the end of the last: int32 [examples + 1]. The key is transformers' name."""
SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures with plain causal attention, optionally with a sliding window: no sinks, no logit soft cap."""
MIN_COMPUTE_CAPABILITY = (8, 0)
"""Minimum compute capability of FlashAttention."""


def use_packed_attention_if_supported(model: PreTrainedModel, recipe: Recipe) -> None:
    """Use packed attention where the recipe's model supports it on this machine."""
    if computes_whole_blocks(recipe) and supports_packed_attention(
        model.config, select_compute_dtype(recipe.computing_dtype)
    ):
        use_packed_attention(model)


def supports_packed_attention(config: PretrainedConfig, dtype: torch.dtype) -> bool:
    """Return whether a model that computes in `dtype` can use packed attention on this machine."""
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
    """Switch the model to packed attention. Rows must be packed, or padded on the right.

    Causal attention then never sees padding. No mask function is registered, not even an empty one: transformers would
    check whether rows are packed, which synchronizes with the GPU.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model.set_attn_implementation(ATTENTION_NAME)
    model.get_decoder().register_forward_pre_hook(pass_boundaries, with_kwargs=True)


def uses_packed_attention(config: PretrainedConfig) -> bool:
    """Return whether `use_packed_attention` was applied to the model with this configuration."""
    return bool(config._attn_implementation == ATTENTION_NAME)


def add_boundaries(batch: dict[str, Any]) -> dict[str, Any]:
    """Add example boundaries to a micro-batch while it is on the host.

    Computed on the GPU, the host would wait for all queued kernels before each micro-batch.
    """
    return batch | {BOUNDARIES_KEY: example_boundaries(batch["position_ids"])} if "position_ids" in batch else batch


def pass_boundaries(decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    found = kwargs.get(BOUNDARIES_KEY)
    if found is None and kwargs.get("position_ids") is None:
        found = row_boundaries(kwargs["input_ids"])
    elif found is None:  # a custom objective did not pass the boundaries on
        found = example_boundaries(kwargs["position_ids"])
    # Dynamic from the first call on, so that one program serves any number of examples; else each number is compiled.
    torch._dynamo.mark_dynamic(found, 0)
    return args, kwargs | {BOUNDARIES_KEY: found}


def example_boundaries(positions: torch.Tensor) -> torch.Tensor:
    """Boundaries of examples packed in rows, from token positions [rows, length].

    Positions restart at 0 in each example.
    """
    starts = (positions.flatten() == 0).nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)


def row_boundaries(tokens: torch.Tensor) -> torch.Tensor:
    """Boundaries of rows [rows, length] that hold one example each, padded on the right."""
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
    """Run FlashAttention on tensors [rows, heads, length, head size].

    Returns [rows, length, heads, head size], and None for the attention weights.
    """
    rows, heads, length, _head = query.shape
    # Under autocast the rotary embedding leaves queries and keys in float32.
    q, k, v = (part.transpose(1, 2).flatten(0, 1).to(value.dtype) for part in (query, key, value))
    found: Any = varlen_attn(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_q,
        length,  # the upper bound: a number that varies with the rows would be recompiled for each value
        length,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=k.shape[1] != heads,
    )
    return found.unflatten(0, (rows, length)), None
