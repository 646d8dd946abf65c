"""The model to train: the base model's weights, and what the recipe's method adds to them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.nn.modules import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from recipes import tensor_parallel
from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.launch import fully_sharded, zero_stage
from recipes.planning import parallel_layout
from recipes.planning.architecture import Architecture
from recipes.planning.memory_budget import adapts_in_computing_type, autocasts
from recipes.planning.recipe_checks import is_named
from recipes.training.lora import compute_in_the_type_of_inputs
from recipes.training.packed_attention import attend_where_it_fits
from recipes.training.parallel import fsdp, zero
from recipes.training.parallel.pipeline_stage import load_stage
from recipes.training.precision import computing_dtype
from recipes.training.token_loss import use_token_losses

NF4_BLOCK = 64


def load_for_training(folder: Path, recipe: Recipe) -> PreTrainedModel | PeftModel:
    """All weights of the base model (full), or those of an adapter on it, whose own are frozen (lora) or in NF4 (qlora).

    What is trained is kept in float32, whatever it computes in: near 0.02 neighbours in bfloat16 are 1e-4 apart, and of
    steps of 5e-6 (zen-72b-full) hardly one would arrive (Micikevicius et al. 2018, section 3.1; row H7).

    With strategy fsdp each process reads and holds its shard of the base model alone (FSDP2), or with tensor parallelism its
    part of each weight, or a shard of that; an adapter is whole in each. With strategy pipeline it holds a stage.
    With deepspeed_zero3 each holds its part too. DeepSpeed makes the copies in float32 that it trains of all weights itself.

    Raises:
        BadConfiguration: an adapter's target is no module of this model, or one is of a width that this machine cannot do;
            or its weights cannot be cut as the recipe asks for.
    """
    refuse_what_cannot_be_cut(folder, recipe)
    dtype = computing_dtype(recipe.computing_dtype)
    if recipe.stages > 1:
        return load_stage(
            folder,
            dist.get_rank(),
            recipe.stages,
            dtype=torch.float32 if recipe.method == "full" else dtype,
            adapt=lambda model: model if recipe.method == "full" else with_adapter(model, recipe),
        )
    if shards := fully_sharded(recipe):
        shards["fsdp_mixed_precision"] &= dtype is torch.bfloat16
    with zero.spread_as_they_are_read(recipe, dtype):
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32 if recipe.method == "full" and not zero_stage(recipe) else dtype,
            attn_implementation="sdpa",
            quantization_config=nf4(dtype, recipe) if recipe.method == "qlora" else None,
            distributed_config=DistributedConfig(**shards) if shards else None,
        )
    use_token_losses(model)
    if recipe.method == "full":
        fsdp.tie(model)
    refuse_widths_of_nf4(model, recipe)
    keep_nf4_as_it_is(model)
    return model if recipe.method == "full" else with_adapter(model, recipe)


def load_reference(model: PreTrainedModel, recipe: Recipe) -> Any:
    """The base of a model whose weights are all trained once more, frozen; spread over the processes as that one is."""
    reference = load_for_training(Path(model.name_or_path), recipe).eval().requires_grad_(False)
    attend_where_it_fits(reference, recipe)
    if zero_stage(recipe) == 3:
        return zero.gathering(reference, recipe)
    return reference.cuda() if torch.cuda.is_available() and not fully_sharded(recipe) else reference


def autocast_dtype(recipe: Recipe) -> torch.dtype | None:
    """In what a model of float32 weights computes its losses, where that is another type; shards see to it themselves."""
    dtype = computing_dtype(recipe.computing_dtype)
    return dtype if autocasts(recipe) and dtype is not torch.float32 else None


def refuse_what_cannot_be_cut(folder: Path, recipe: Recipe) -> None:
    if recipe.together > 1:
        shape = Architecture.from_config(json.loads((folder / "config.json").read_text()))
        if problem := tensor_parallel.untried(recipe, shape) or parallel_layout.untried(recipe, shape):
            raise BadConfiguration(f"recipe '{recipe.name}': {problem}")


def refuse_widths_of_nf4(model: PreTrainedModel, recipe: Recipe) -> None:
    """On processors with AVX-512, bitsandbytes 0.50 reads rows of NF4 wrong that end within a block: their error is 25 %."""
    for name, module in model.named_modules() if not torch.cuda.is_available() else ():
        if isinstance(module, Linear4bit) and module.in_features % NF4_BLOCK:
            raise BadConfiguration(
                f"recipe '{recipe.name}': {name} is {module.in_features} wide, and without a GPU NF4 is right for multiples "
                f"of {NF4_BLOCK} alone: use method lora"
            )


def keep_nf4_as_it_is(model: PreTrainedModel) -> None:
    """On processors that compute in bfloat16, bitsandbytes 0.50 packs NF4 weights for good when they are first evaluated:
    their constants are rounded, and no gradient comes back through them. A run that was resumed later was another one.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def nf4(dtype: torch.dtype, recipe: Recipe) -> BitsAndBytesConfig:
    """Projections in NF4, computing in `dtype` (Dettmers et al. 2023); embeddings, head and norms stay as they are."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=recipe.double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


def refuse_left_out(adapted: Sequence[str], recipe: Recipe) -> None:
    """The library says nothing of a target that it does not find, where it finds another: it was not trained, in silence."""
    for target in recipe.lora_target_modules:
        if not any(is_named(module, target) for module in adapted):
            raise BadConfiguration(f"recipe '{recipe.name}' does not fit its base model: it has no module '{target}'")


def with_adapter(model: PreTrainedModel, recipe: Recipe) -> PeftModel:
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
    if recipe.stages == 1:  # a stage has some of the modules alone
        refuse_left_out(adapted.base_model.targeted_module_names, recipe)
    if adapts_in_computing_type(recipe) and computing_dtype(recipe.computing_dtype) is torch.bfloat16:
        compute_in_the_type_of_inputs(adapted)
    return adapted
