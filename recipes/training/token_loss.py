"""Token-wise cross-entropy that never copies all logits to float32.

Logits have one row per target token, as wide as the vocabulary: for 8,192 tokens and a vocabulary of 152,000 a float32
copy is 5 GB, and transformers' cross-entropy holds three at once. Here only one block of rows is in float32 at a time.
Autograd keeps the logits unchanged, and one gradient of the same dtype.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import log_softmax, pad
from torch.nn.functional import softmax as shares_of
from transformers.loss.loss_utils import ForCausalLMLoss

from recipes.training.data.examples import IGNORED_LABEL

BLOCK_BYTES = 32 << 20
"""Size of a block in float32: small enough for the caches of a GPU or CPU, large enough to amortize a kernel launch."""


def compute_token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute cross-entropy in nats as float32 [tokens] from logits [tokens, vocabulary].

    The loss is 0 where the target is IGNORED_LABEL.
    """
    found: torch.Tensor = TokenLossFunction.apply(logits, targets)  # type: ignore[no-untyped-call]
    return found


def use_token_losses(model: Any) -> None:
    """Replace the loss function of a transformers model, if it is the default one."""
    if model.loss_function is ForCausalLMLoss:
        model.loss_function = causal_loss


def causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Equivalent of transformers' `ForCausalLMLoss`.

    Args:
        labels: token ids [rows, length], shifted here.
        num_items_in_batch: divisor of the sum; by default the number of targets in this batch.
        shift_labels: the target of each logit, instead of `labels`.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
    following = shift_labels.flatten().to(logits.device)
    items = (following != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    return compute_token_losses(logits.view(-1, vocab_size), following).sum() / items


class TokenLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        learned = targets != IGNORED_LABEL
        words = targets.where(learned, 0)
        found = [
            -log_softmax(some, -1, dtype=torch.float32).gather(1, word[:, None])[:, 0]
            for some, word in iterate_blocks(logits, words)
        ]
        losses = torch.cat(found).where(learned, 0.0)
        ctx.save_for_backward(logits, words, learned, losses)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The softmax probabilities, less 1 at each target."""
        logits, words, learned, losses = ctx.saved_tensors
        weights = gradients[0] * learned
        gradient = torch.empty_like(logits)
        for into, some, weight in iterate_blocks(gradient, logits, weights):
            torch.mul(shares_of(some, -1, dtype=torch.float32), weight[:, None], out=into)
        # Not `scatter_`: on a CPU it copies all 16-bit values to float32.
        gradient[torch.arange(len(words), device=words.device), words] = (torch.expm1(-losses) * weights).to(gradient.dtype)
        return gradient, None


def iterate_blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Split tensors into blocks of rows; the first's fit `BLOCK_BYTES` in float32."""
    rows = max(1, BLOCK_BYTES // (torch.float32.itemsize * tensors[0].shape[1]))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)  # type: ignore[no-untyped-call]
