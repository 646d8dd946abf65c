"""Apply LoRA adapters, computed in the dtype of their inputs."""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant


class InputDtypeLora(LoraVariant):  # type: ignore[misc]
    """`result + scaling * B(A(x))`: A and `scaling * B` are rounded once, their gradients arrive in float32.

    PEFT 0.21 calls its base class one that may change. Nothing is merged with it: `recipes.export.merge` loads the adapter anew.
    """

    @staticmethod
    def forward(module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:
        down = module.lora_A[active_adapter].weight.to(x.dtype)
        up = (module.lora_B[active_adapter].weight * module.scaling[active_adapter]).to(x.dtype)
        inner = module.lora_dropout[active_adapter](x) @ down.t()
        whole = torch.addmm(result.flatten(0, -2), inner.flatten(0, -2), up.t())  # adds within the product
        return whole.view(result.shape)


def compute_lora_in_input_dtype(model: PeftModel) -> None:
    """For a model whose adapters are whole: their weights are read without calling their modules, whose hooks would gather
    what is spread over processes.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
            module.lora_variant = dict.fromkeys(module.lora_A, InputDtypeLora())
