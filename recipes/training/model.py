"""The model to train: the base model's weights, and what the recipe's method adds to them."""

from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from recipes.arithmetic import computing_dtype
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration


def load_for_training(folder: Path, recipe: Recipe) -> PreTrainedModel | PeftModel:
    """All weights of the base model (full), or those of an adapter on it, whose own are frozen (lora).

    Raises:
        BadConfiguration: an adapter's target is no module of this model.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=computing_dtype(recipe.computing_dtype), attn_implementation="sdpa"
    )
    return model if recipe.method == "full" else with_adapter(model, recipe)


def with_adapter(model: PreTrainedModel, recipe: Recipe) -> PeftModel:
    lora = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=list(recipe.lora_target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, lora)
    except ValueError as error:
        raise BadConfiguration(f"recipe '{recipe.name}' does not fit its base model: {error}") from None
