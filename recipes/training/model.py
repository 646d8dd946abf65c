"""The model to train: the base model's weights, and what the recipe's method adds to them."""

from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from recipes.arithmetic import computing_dtype
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration


def load_for_training(folder: Path, recipe: Recipe) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=computing_dtype(recipe.base_dtype), attn_implementation="sdpa"
    )
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
