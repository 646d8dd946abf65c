"""Load the model to train, with the weights that it starts from."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.nn.modules import Linear4bit
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.planning import parallel_layout
from recipes.planning.architecture import Architecture
from recipes.planning.memory_budget import uses_autocast
from recipes.planning.parallel_layout import fsdp_config, saves_by_name, zero_stage
from recipes.runner import log_line
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.checkpointing.sharded_safetensors import ShardedTensors
from recipes.training.lora import apply_lora
from recipes.training.packed_attention import use_packed_attention_if_supported
from recipes.training.parallel import fsdp, zero
from recipes.training.parallel.fsdp import load_weights
from recipes.training.parallel.pipeline_stage import load_adapter, load_stage
from recipes.training.parallel.process_group import ProcessGroup
from recipes.training.precision import select_compute_dtype
from recipes.training.token_loss import use_token_losses

NF4_BLOCK = 64


def load_model(folder: Path, recipe: Recipe) -> PreTrainedModel | PeftModel:
    """Load the model to train.

    With method full all weights are trained; with lora and qlora an adapter on a base that is frozen in the compute dtype or
    in NF4. Trained weights are always float32: near 0.02 adjacent bfloat16 values are 1e-4 apart, so of steps of 5e-6
    (zen-72b-full) hardly any would change a weight (Micikevicius et al. 2018, section 3.1).

    With strategy fsdp each process reads and holds only its shard of the base model (FSDP2), with tensor parallelism its
    slice of each weight, or a shard of that; an adapter is replicated. With strategy pipeline it holds one stage. With
    deepspeed_zero3 each holds a shard too. DeepSpeed makes the float32 master copies itself.

    Raises:
        BadConfiguration: an adapter target is no module of this model, a layer's width is unsupported on this machine, or
            the weights cannot be split as the recipe requires.
    """
    check_parallel_layout(folder, recipe)
    dtype = select_compute_dtype(recipe.computing_dtype)
    if recipe.stages > 1:
        return load_stage(
            folder,
            dist.get_rank(),
            recipe.stages,
            dtype=torch.float32 if recipe.method == "full" else dtype,
            adapt=lambda model: model if recipe.method == "full" else apply_lora(model, recipe),
        )
    if shards := fsdp_config(recipe):
        shards["fsdp_mixed_precision"] &= dtype is torch.bfloat16
    with zero.shard_while_loading(recipe, dtype):
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32 if recipe.method == "full" and not zero_stage(recipe) else dtype,
            attn_implementation="sdpa",
            quantization_config=nf4_config(dtype, recipe) if recipe.method == "qlora" else None,
            distributed_config=DistributedConfig(**shards) if shards else None,
        )
    use_token_losses(model)
    if recipe.method == "full":
        fsdp.tie_weights(model)
    check_nf4_widths(model, recipe)
    disable_nf4_repacking(model)
    return model if recipe.method == "full" else apply_lora(model, recipe)


def load_reference_model(model: PreTrainedModel, recipe: Recipe) -> Any:
    """Load a frozen copy of a fully trained model's base, sharded like the model."""
    reference = load_model(Path(model.name_or_path), recipe).eval().requires_grad_(False)
    use_packed_attention_if_supported(reference, recipe)
    if zero_stage(recipe) == 3:
        return zero.make_inference_engine(reference, recipe)
    return reference.cuda() if torch.cuda.is_available() and not fsdp_config(recipe) else reference


def autocast_dtype(recipe: Recipe) -> torch.dtype | None:
    """Return the autocast dtype of a model with float32 weights, or None without autocast.

    FSDP casts by itself.
    """
    dtype = select_compute_dtype(recipe.computing_dtype)
    return dtype if uses_autocast(recipe) and dtype is not torch.float32 else None


def check_parallel_layout(folder: Path, recipe: Recipe) -> None:
    if recipe.model_parallel_size > 1:
        shape = Architecture.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        if problem := parallel_layout.find_tensor_parallel_problem(recipe, shape) or parallel_layout.find_pipeline_problem(
            recipe, shape
        ):
            raise BadConfiguration(f"recipe '{recipe.name}': {problem}")


def check_nf4_widths(model: PreTrainedModel, recipe: Recipe) -> None:
    """Reject layers whose width is no multiple of the NF4 block on a CPU.

    With AVX-512, bitsandbytes 0.50 misreads rows of NF4 that end within a block, with errors of 25 %.
    """
    for name, module in model.named_modules() if not torch.cuda.is_available() else ():
        if isinstance(module, Linear4bit) and module.in_features % NF4_BLOCK:
            raise BadConfiguration(
                f"recipe '{recipe.name}': {name} is {module.in_features} wide, but without a GPU NF4 is only correct for "
                f"multiples of {NF4_BLOCK}: use method lora"
            )


def disable_nf4_repacking(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking NF4 weights on CPUs that compute in bfloat16.

    bitsandbytes 0.50 repacks them permanently at the first evaluation: the constants are rounded and no gradient flows
    through. A run that was resumed afterwards gave different results.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def nf4_config(dtype: torch.dtype, recipe: Recipe) -> BitsAndBytesConfig:
    """Configure NF4 projections that compute in `dtype` (Dettmers et al. 2023).

    Embeddings, head and norms are not quantized.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=recipe.double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


# Starting weights from another run, the optional job input `start`: population-based training passes them to its members.


def load_starting_weights(
    start: Artifact, model: PreTrainedModel | PeftModel, recipe: Recipe, group: ProcessGroup, store: Store, cache: Path
) -> None:
    """Initialize a model with the weights of `start`.

    Raises:
        BadConfiguration: they do not fit the model.
    """
    with group.local_leader_first():
        weights = store.fetch(start, cache)
    if zero_stage(recipe) == 3 and recipe.method == "full":
        zero.load_weights(model, weights, is_leader=group.is_leader)
    elif saves_by_name(recipe) and not isinstance(model, PeftModel):
        load_weights(model, weights)
    elif recipe.stages > 1:
        load_adapter(model, weights)
    else:
        copy_weights(model, f"input 'start' ({start.uri})", weights)
    log_line(f"starting from the weights of {start.uri}")


def copy_weights(model: PreTrainedModel | PeftModel, name: str, folder: Path) -> None:
    """Copy the trained weights of a run or a checkpoint from `folder` into a model.

    `name` is used in error messages. Optimizer and schedule start fresh: their state belongs to other hyperparameters.

    Raises:
        BadConfiguration: there are no weights, or they have other shapes.
    """
    is_adapter = isinstance(model, PeftModel)
    files = sorted(folder.glob("adapter_model.safetensors" if is_adapter else "model*.safetensors"))
    if not files:
        raise BadConfiguration(f"{name} has no {'adapter' if is_adapter else 'weights'}: start from another run")
    weights = ShardedTensors(files)
    own: dict[str, torch.Tensor] = get_peft_model_state_dict(model) if is_adapter else model.state_dict()
    given = {own[name].data_ptr() for name in weights.names if name in own}
    differing = [name for name in weights.names if name not in own or not has_same_shape(weights.shape(name), own[name])]
    # the rest are tied weights
    differing += [name for name in own if weights.shape(name) is None and own[name].data_ptr() not in given]
    if differing:
        raise BadConfiguration(f"{name} does not fit the recipe: {min(differing)} has another shape")
    if is_adapter:
        set_peft_model_state_dict(model, {name: weights.read(name) for name in weights.names})
        return
    for name in weights.names:  # one by one: holding all of them in addition to the model doubles the memory
        own[name].copy_(weights.read(name).view_as(own[name]))


def has_same_shape(shape: torch.Size | None, weight: torch.Tensor) -> bool:
    """Compare shapes; DeepSpeed's checkpoints hold each weight flattened."""
    return shape in (weight.shape, (weight.numel(),))
