"""LoRA that computes in the dtype of its input, compared with PEFT."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from recipes.training import lora
from recipes.training import model as loading
from recipes.training.lora import compute_lora_in_input_dtype
from tests.recipes.tiny_training import LORA, TinyTraining

IN, OUT, RANK = 48, 64, 8


class Projection(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(IN, OUT, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def adapted(dtype: torch.dtype, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=24, lora_dropout=dropout, target_modules=["inner"])
    model: Any = get_peft_model(Projection(dtype), config).train()
    torch.nn.init.normal_(model.base_model.model.inner.lora_B["default"].weight)
    return model


def computed(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result, and the gradients of both LoRA matrices and of the input."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    result = model(x)
    result.float().square().sum().backward()
    inner = model.base_model.model.inner
    return [result, inner.lora_A["default"].weight.grad, inner.lora_B["default"].weight.grad, x.grad]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
def test_lora_computing_in_input_dtype_matches_peft(dtype: torch.dtype, within: float, dropout: float) -> None:
    x = torch.randn(2, 5, IN, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = computed(adapted(dtype, dropout), x)
    model = adapted(dtype, dropout)
    compute_lora_in_input_dtype(model)
    found = computed(model, x)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).norm() / other.norm()) < within
    assert found[1].dtype is torch.float32, "what is trained is in float32"


def test_lora_computes_in_input_dtype_only_for_bfloat16(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyTraining(tmp_path)

    def copies(base_dtype: str) -> bool:
        """Return whether an adapter's input is cast to the dtype of its weights."""
        for module in (loading, lora):
            monkeypatch.setattr(module, "select_compute_dtype", lambda wanted: getattr(torch, wanted))
        recipe = tiny.recipe(**LORA | {"base_dtype": base_dtype})
        model = loading.load_model(tiny.model, recipe)
        layer = next(each for each in model.modules() if hasattr(each, "lora_variant"))
        return bool(getattr(layer, "cast_input_dtype_enabled", True)) and not layer.lora_variant

    assert not copies("bfloat16")
    assert copies("float32") and copies("float16")
