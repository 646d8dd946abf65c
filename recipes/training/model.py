"""The model to train: the base model's weights, and what the recipe's method adds to them."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from recipes.arithmetic import computing_dtype
from recipes.launch import fully_sharded
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration


def load_for_training(folder: Path, recipe: Recipe) -> PreTrainedModel | PeftModel:
    """All weights of the base model (full), or those of an adapter on it, whose own are frozen (lora) or in NF4 (qlora).

    With strategy fsdp each process reads and holds its shard of the base model alone (FSDP2); an adapter is whole in each.

    Raises:
        BadConfiguration: an adapter's target is no module of this model.
    """
    dtype = computing_dtype(recipe.computing_dtype)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="sdpa",
        quantization_config=nf4(dtype, recipe) if recipe.method == "qlora" else None,
        distributed_config=DistributedConfig(**shards) if (shards := fully_sharded(recipe)) else None,
    )
    return model if recipe.method == "full" else with_adapter(model, recipe)


def nf4(dtype: torch.dtype, recipe: Recipe) -> BitsAndBytesConfig:
    """Projections in NF4, computing in `dtype` (Dettmers et al. 2023); embeddings, head and norms stay as they are."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=recipe.double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


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
