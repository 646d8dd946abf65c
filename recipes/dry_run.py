"""Dry-run recipes without weights: `python -m recipes.dry_run NAME_OR_FILE...` prints reports as JSON.

The base model is built on PyTorch's meta device, where tensors have a size but no data, adapters are added, and one
micro-batch is run. So module names, parameter counts and activations are those of the training libraries at full size,
within seconds on any machine. NF4 weights are built in their compute dtype: shapes are the same.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.startup import prepare_imports

if __name__ == "__main__":
    prepare_imports()

import torch
from transformers import AutoConfig, AutoModelForCausalLM, logging

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.planning.activation_memory import saved_activation_bytes
from recipes.planning.architecture import Architecture
from recipes.planning.memory_budget import build_forward_pass, estimate_stages, trained_tensors, uses_autocast
from recipes.planning.parallel_layout import assign_stage, build_torchrun_command, sharding_arguments, stage_shapes
from recipes.planning.recipe_checks import resolve_shape
from recipes.runner import enable_garbage_collection
from recipes.training.lora import apply_lora
from recipes.training.token_loss import use_token_losses


class DryRunStage(FrozenModel):
    """Contents of a GPU in a pipelined model, and its estimated memory."""

    parameters: int
    parameters_expected: int
    trainable: int
    memory: int


class DryRunReport(FrozenModel):
    """Results of a dry run; counts are numbers of elements, sizes are in bytes.

    `kept` and `kept_expected` are the activations of a micro-batch, as stored by autograd and as estimated by the memory
    budget. None without checkpointing: attention is not fused on the meta device, and stores more than in a real run.
    """

    recipe: str
    parameters: int
    parameters_expected: int
    trainable: int
    trainable_expected: int
    adapted_modules: int
    kept: int | None
    kept_expected: int | None
    command: tuple[str, ...]
    sharding: dict[str, Any]
    stages: tuple[DryRunStage, ...] = ()


def dry_run(recipe: Recipe) -> DryRunReport:
    """Build the model, add adapters and run one micro-batch.

    Raises:
        BadConfiguration: the base model's shape is unknown, or it lacks a target module.
    """
    shape = resolve_shape(recipe)
    expected = sum(tensors.total for tensors in trained_tensors(recipe, shape))
    model = build_meta_model(recipe, shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if recipe.method != "full":
        with torch.device("meta"):
            model = apply_lora(model, recipe)
    measured = recipe.gradient_checkpointing
    return DryRunReport(
        recipe=recipe.name,
        parameters=parameters,
        parameters_expected=shape.parameters,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        trainable_expected=expected,
        adapted_modules=sum(1 for name, _ in model.named_modules() if name.endswith(".lora_A")),
        kept=measure_activation_bytes(model, recipe) if measured else None,
        kept_expected=saved_activation_bytes(build_forward_pass(recipe, shape)) if measured else None,
        command=build_torchrun_command(recipe),
        sharding=sharding_arguments(recipe),
        stages=tuple(describe_stages(model, recipe, shape)) if recipe.stages > 1 else (),
    )


def describe_stages(model: Any, recipe: Recipe, shape: Architecture) -> Iterator[DryRunStage]:
    """Yield the contents of each pipeline stage, assigned as in training."""
    each = zip(stage_shapes(recipe, shape), estimate_stages(recipe, shape), strict=True)
    for rank, (expected, budget) in enumerate(each):
        stage = assign_stage(rank, recipe.stages, shape.num_hidden_layers, tied=shape.tie_word_embeddings)
        own = [parameter for name, parameter in model.named_parameters() if stage.owns(name)]
        adapters = sum(parameter.numel() for parameter in own if parameter.requires_grad) if recipe.method != "full" else 0
        yield DryRunStage(
            parameters=sum(parameter.numel() for parameter in own) - adapters,
            parameters_expected=expected.parameters,
            trainable=sum(parameter.numel() for parameter in own if parameter.requires_grad),
            memory=int(budget.needed),
        )


def build_meta_model(recipe: Recipe, shape: Architecture) -> Any:
    """Build the base model on the meta device."""
    config = AutoConfig.for_model(**shape.model_dump(exclude_none=True))
    with torch.device("meta"):
        dtype = torch.float32 if uses_autocast(recipe) else getattr(torch, recipe.computing_dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    use_token_losses(model)
    return model


def measure_activation_bytes(model: Any, recipe: Recipe) -> int:
    """Return the bytes that autograd stores for a checkpointed micro-batch with its loss, without weights.

    Each storage counts once.
    """
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    own = {tensor.untyped_storage()._cdata for tensor in itertools.chain(model.parameters(), model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # references keep addresses from being reused

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    rows, length = recipe.sequences, recipe.sequence_length
    tokens = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens, position_ids=tokens, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def main() -> None:
    enable_garbage_collection()
    logging.set_verbosity_error()
    try:
        found = [dry_run(Recipe.load(Path(name)) if "." in name else Recipe.named(name)) for name in sys.argv[1:]]
    except BadConfiguration as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
    print(json.dumps([tried.model_dump(mode="json") for tried in found]))


if __name__ == "__main__":
    main()
