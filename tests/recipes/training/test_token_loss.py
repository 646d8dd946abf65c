"""Blockwise losses equal those of the libraries, and take less memory."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from recipes.training import token_loss as module
from recipes.training.data.examples import IGNORED_LABEL
from recipes.training.token_loss import causal_loss, compute_token_losses, use_token_losses

TOKENS, WORDS = 50, 40
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=[7, TOKENS, TOKENS + 1], ids=["with a rest", "in one part", "in less than one"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set and return the number of rows per block."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * WORDS * request.param + 3)
    return int(request.param)


def predicted(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = (torch.randn(TOKENS, WORDS) * 3).to(dtype).requires_grad_()
    targets = torch.randint(0, WORDS, (TOKENS,))
    targets[::3] = IGNORED_LABEL
    return logits, targets


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_token_losses_equal_torch_cross_entropy_bit_for_bit(rows: int, dtype: torch.dtype) -> None:
    logits, targets = predicted(dtype)
    expected = cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORED_LABEL)
    found = compute_token_losses(logits, targets)
    assert found.dtype == torch.float32
    assert found.equal(expected)
    assert (found[::3] == 0).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_token_loss_gradients_equal_torch_for_any_weights(rows: int, dtype: torch.dtype) -> None:
    logits, targets = predicted(dtype)
    weights = torch.randn(TOKENS)
    of_library = (cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORED_LABEL) * weights).sum()
    expected = torch.autograd.grad(of_library, logits)[0]
    found = torch.autograd.grad((compute_token_losses(logits, targets) * weights).sum(), logits)[0]
    assert found.dtype == dtype
    assert found[::3].count_nonzero() == 0
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


def test_infinite_logits_of_ignored_tokens_are_harmless(rows: int) -> None:
    logits, targets = predicted(torch.float32)
    with torch.no_grad():
        logits[::3] = torch.inf
    assert compute_token_losses(logits, targets).isfinite().all()


def test_token_losses_of_empty_input_are_empty() -> None:
    logits = torch.zeros(0, WORDS, requires_grad=True)
    found = compute_token_losses(logits, torch.zeros(0, dtype=torch.int64))
    found.sum().backward()
    assert found.shape == (0,)
    assert logits.grad is not None and logits.grad.shape == (0, WORDS)


@pytest.mark.parametrize("items", [None, torch.tensor(77)], ids=["its own tokens", "those of the step"])
@pytest.mark.parametrize("shifted", [True, False])
def test_micro_batch_loss_equals_transformers(shifted: bool, items: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 20, WORDS), torch.randint(0, WORDS, (3, 20))
    labels[:, ::4] = IGNORED_LABEL
    given: dict[str, Any] = {"labels": None, "shift_labels": labels} if shifted else {"labels": labels}
    expected = ForCausalLMLoss(logits, vocab_size=WORDS, num_items_in_batch=items, **given)
    found = causal_loss(logits, vocab_size=WORDS, num_items_in_batch=items, **given)
    assert found == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_token_loss_memory_is_the_gradient_plus_a_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's loss holds three times the logits in float32."""
    monkeypatch.setattr(module, "BLOCK_BYTES", part := 4 * WORDS * 7)
    logits = torch.randn(600, WORDS).to(dtype).requires_grad_()
    targets = torch.randint(0, WORDS, (600,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        torch.autograd.grad(compute_token_losses(logits, targets).sum(), logits)
    held = most = 0
    for event in sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    gradient, of_tokens = logits.numel() * dtype.itemsize, 600 * 64
    assert gradient < most < gradient + 3 * part + of_tokens


def tiny() -> Any:
    config = LlamaConfig(vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(config)


def test_model_uses_token_losses() -> None:
    model = tiny()
    tokens = torch.randint(0, WORDS, (2, 9))
    expected = model(input_ids=tokens, labels=tokens).loss
    use_token_losses(model)
    found = model(input_ids=tokens, labels=tokens).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert "TokenLossFunction" in names_behind(found)


def test_model_with_a_custom_loss_keeps_it() -> None:
    model = tiny()
    model.loss_function = own = lambda **_: torch.zeros(())
    use_token_losses(model)
    assert model.loss_function is own


def names_behind(tensor: torch.Tensor) -> str:
    """Return the names of the operations that produced the tensor."""
    open_, found = [tensor.grad_fn], []
    while open_:
        node = open_.pop()
        if node is not None:
            found.append(node.name())
            open_ += [before for before, _ in node.next_functions]
    return " ".join(found)
