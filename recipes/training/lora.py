"""Apply LoRA adapters, computed in the dtype of their inputs."""

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from transformers import PreTrainedModel

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.planning.memory_budget import adapter_uses_compute_dtype
from recipes.planning.recipe_checks import matches_target
from recipes.training.precision import select_compute_dtype


class InputDtypeLora(LoraVariant):  # type: ignore[misc]
    """Compute `result + scaling * B(A(x))` in the input's dtype.

    A and `scaling * B` are rounded once, and their gradients arrive in float32. PEFT 0.21 declares the base class unstable.
    Merging is not affected: `recipes.export.merge` loads the adapter with PEFT's default variant.
    """

    @staticmethod
    def forward(module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:
        down = module.lora_A[active_adapter].weight.to(x.dtype)
        up = (module.lora_B[active_adapter].weight * module.scaling[active_adapter]).to(x.dtype)
        inner = module.lora_dropout[active_adapter](x) @ down.t()
        # the addition is fused into the matrix product
        whole = torch.addmm(result.flatten(0, -2), inner.flatten(0, -2), up.t())
        return whole.view(result.shape)


def compute_lora_in_input_dtype(model: PeftModel) -> None:
    """Switch all LoRA layers of a model to `InputDtypeLora`. Not for sharded adapters.

    The weights are read without calling their modules, so FSDP's hooks, which would gather the shards, do not run.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
            module.lora_variant = dict.fromkeys(module.lora_A, InputDtypeLora())


def check_lora_targets(adapted: Sequence[str], recipe: Recipe) -> None:
    """Raise BadConfiguration unless every target module of the recipe was adapted.

    PEFT ignores a missing target silently as long as another one matches; it then stayed untrained without a message.
    """
    for target in recipe.lora_target_modules:
        if not any(matches_target(module, target) for module in adapted):
            raise BadConfiguration(f"recipe '{recipe.name}' does not fit its base model: it has no module '{target}'")


def apply_lora(model: PreTrainedModel, recipe: Recipe) -> PeftModel:
    """Add LoRA adapters to a model.

    Raises:
        BadConfiguration: the recipe's target modules do not fit the model.
    """
    lora = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=list(recipe.lora_target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, lora)
    except ValueError as error:
        raise BadConfiguration(f"recipe '{recipe.name}' does not fit its base model: {error}") from None
    if recipe.stages == 1:  # a pipeline stage holds only some of the modules
        check_lora_targets(adapted.base_model.targeted_module_names, recipe)
    if adapter_uses_compute_dtype(recipe) and select_compute_dtype(recipe.computing_dtype) is torch.bfloat16:
        compute_lora_in_input_dtype(adapted)
    return adapted
