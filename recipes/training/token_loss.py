"""What a model's prediction of each token costs, without its logits once more in float32.

A row of logits is as wide as the vocabulary, and there is one for each token that is learned: of 8,192 tokens and 152,000
words a copy in float32 is 5 GB, and the library's cross-entropy holds three at once. Here no more of that type is there than
of one part of the rows. Autograd keeps the logits as they are, and has one gradient of their own type.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import log_softmax, pad
from torch.nn.functional import softmax as shares_of
from transformers.loss.loss_utils import ForCausalLMLoss

from recipes.training.data.examples import IGNORED_LABEL

BLOCK_BYTES = 32 << 20
"""Of a part in float32. Small enough for the caches of a GPU or of a processor, and worth the time to begin with it."""


def compute_token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats [tokens], in float32, of logits [tokens, vocabulary]; 0 where the target is IGNORED."""
    found: torch.Tensor = TokenLossFunction.apply(logits, targets)  # type: ignore[no-untyped-call]
    return found


def use_token_losses(model: Any) -> None:
    """Let a model of transformers compute its loss so, from now on, if it has the usual one."""
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
    """What transformers' `ForCausalLMLoss` computes: the mean over `num_items_in_batch` tokens, or over those that are here.

    `labels` [rows, length] are the tokens themselves, `shift_labels` what follows each place of the logits.
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
        """Of each word its share in the prediction, less 1 for the word that follows."""
        logits, words, learned, losses = ctx.saved_tensors
        weights = gradients[0] * learned
        gradient = torch.empty_like(logits)
        for into, some, weight in iterate_blocks(gradient, logits, weights):
            torch.mul(shares_of(some, -1, dtype=torch.float32), weight[:, None], out=into)
        # Not with `scatter_`: on a processor that makes a copy in float32 of all that is in 16 bits.
        gradient[torch.arange(len(words), device=words.device), words] = (torch.expm1(-losses) * weights).to(gradient.dtype)
        return gradient, None


def iterate_blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Rows of all, as many at once as make a part of the first in float32."""
    rows = max(1, BLOCK_BYTES // (torch.float32.itemsize * tensors[0].shape[1]))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)  # type: ignore[no-untyped-call]
