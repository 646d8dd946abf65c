"""CPU kernels for PyTorch's variable-length attention.

PyTorch itself only has FlashAttention's, for GPUs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import varlen


@contextmanager
def on_a_processor() -> Iterator[None]:
    """Register CPU kernels for `varlen_attn`, forward and backward, by the definition of attention."""
    operations: list[tuple[Any, Any]] = [(varlen._varlen_attn, forward), (varlen._varlen_attn_backward, backward)]
    for operation, kernel in operations:
        operation.register_kernel("cpu")(kernel)
    yield
    for operation, _ in operations:
        operation.register_kernel("cpu")(operation._init_fn)


def shares(q: torch.Tensor, k: torch.Tensor, bounds: torch.Tensor, scale: float, window: Sequence[int]) -> torch.Tensor:
    """Return the attention weights: [heads, tokens, tokens]."""
    place = torch.arange(len(q))
    example = torch.searchsorted(bounds[1:].contiguous(), place.int(), right=True)
    back = place[:, None] - place
    seen = (example[:, None] == example) & (back >= 0) & ((back <= window[0]) if window[0] >= 0 else True)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf).softmax(-1)


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Repeat keys and values for the query heads that share them."""
    together = query.shape[1] // key.shape[1]
    return query.float(), key.float().repeat_interleave(together, 1), value.float().repeat_interleave(together, 1)


def shared(gradient: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Sum the gradient over the query heads that share a head of `part`."""
    tokens, heads, size = part.shape
    return torch.empty_like(part).copy_(gradient.view(tokens, heads, -1, size).sum(2))


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert max_q >= int(cu_seq_q.diff().max()) and scale is not None
    q, k, v = whole(query, key, value)
    found = torch.einsum("hqk,khd->qhd", shares(q, k, cu_seq_q, scale, window_size), v)
    nothing = torch.zeros(query.shape[1], query.shape[0])
    return torch.empty_like(query).copy_(found), nothing, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: Any = None,
) -> tuple[torch.Tensor, ...]:
    assert scale is not None
    q, k, v = whole(query, key, value)
    taken, given = shares(q, k, cu_seq_q, scale, window_size), grad_out.float()
    of_shares = torch.einsum("qhd,khd->hqk", given, v)
    of_logits = taken * (of_shares - (of_shares * taken).sum(-1, keepdim=True)) * scale
    return (
        shared(torch.einsum("hqk,khd->qhd", of_logits, k), query),
        shared(torch.einsum("hqk,qhd->khd", of_logits, q), key),
        shared(torch.einsum("hqk,qhd->khd", taken, given), value),
    )
