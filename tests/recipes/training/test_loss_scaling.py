"""Loss scaling: float16 training learns like float32, despite gradients below the range of float16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

from recipes.training.model import load_model
from recipes.training.precision import loss_scale, scale_gradient, unscale_gradients
from tests.recipes.tiny_training import LORA, TinyTraining

TOKENS = 2**17
"""Tokens per step; only its first micro-batch is computed here."""
ROWS = torch.arange(1, 65).reshape(2, 32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    return TinyTraining(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def float16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a CPU with float16 instructions."""
    (tmp_path / "cpuinfo").write_text("flags : avx512_fp16\n")
    monkeypatch.setattr("recipes.training.precision.CPUINFO", tmp_path / "cpuinfo")


def gradients(tiny: TinyTraining, scale: float, **changed: Any) -> torch.Tensor:
    """Return the gradients of all trainable weights as one vector."""
    recipe = tiny.recipe(**(LORA | changed))
    set_seed(1)
    model = load_model(tiny.model, recipe)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)  # otherwise lora_A receives no gradient
    unscale_gradients(model.parameters(), scale)
    loss = model(input_ids=ROWS, labels=ROWS).loss * (ROWS.numel() / TOKENS)
    scale_gradient(loss, scale).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.requires_grad])


def test_loss_scaling_preserves_gradients_below_float16_range(tiny: TinyTraining, float16: None) -> None:
    expected = gradients(tiny, 1.0)
    lost = gradients(tiny, 1.0, base_dtype="float16")
    found = gradients(tiny, float(TOKENS), base_dtype="float16")
    assert torch.linalg.norm(lost - expected) > 0.05 * torch.linalg.norm(expected), "or there is nothing to mend"
    assert torch.linalg.norm(found - expected) < 0.01 * torch.linalg.norm(expected)


def test_loss_scaling_is_exact_without_underflow(tiny: TinyTraining) -> None:
    assert torch.equal(gradients(tiny, 1.0), gradients(tiny, 1024.0))


def test_loss_scale_depends_on_tokens_per_step(tiny: TinyTraining, float16: None) -> None:
    half = LORA | {"base_dtype": "float16"}
    assert loss_scale(tiny.recipe(**half)) == 256  # 2 rows of 64 tokens, twice
    assert loss_scale(tiny.recipe(**half, objective="orpo")) == 4
    assert loss_scale(tiny.recipe(**LORA)) == 1


@pytest.mark.requirement("H7")
def test_float16_run_matches_float32_losses(tiny: TinyTraining, float16: None) -> None:
    exact, half = (tiny.train(dtype, **LORA | {"base_dtype": dtype}) for dtype in ("float32", "float16"))
    assert list(half.facts["losses"].values()) == pytest.approx(list(exact.facts["losses"].values()), rel=0.01)
