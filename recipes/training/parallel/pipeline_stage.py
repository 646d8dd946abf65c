"""Load and save one pipeline stage of a model."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from recipes.contracts.job import BadConfiguration
from recipes.planning.parallel_layout import PipelineStage, assign_stage
from recipes.training.checkpointing.sharded_safetensors import ShardedTensors
from recipes.training.token_loss import use_token_losses

ADAPTER_FILE = "adapter_model.safetensors"


def load_stage(
    folder: Path, rank: int, stages: int, dtype: torch.dtype, adapt: Callable[[PreTrainedModel], Any]
) -> PreTrainedModel | PeftModel:
    """Load the part of the base model in `folder` that this process holds.

    `adapt` adds an adapter if there is one. `adapt` sees all layers, those of other stages without data: an adapter's
    initial weights are drawn in the order of the whole model, and equal those of a single process.

    Raises:
        BadConfiguration: the files name other tensors than the model has.
    """
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    stage = assign_stage(rank, stages, config.num_hidden_layers, tied=config.tie_word_embeddings)
    files = ShardedTensors(sorted(folder.glob("*.safetensors")))
    names = [name for name, _ in model.named_parameters() if stage.owns(name)]
    if missing := set(names) - {*files.names}:
        raise BadConfiguration(f"strategy pipeline reads weights by name, and {folder} has no {min(missing)}: use fsdp")
    model.load_state_dict({name: files.read(name).to(dtype) for name in names}, strict=False, assign=True)
    if stage.tied and stage.last:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.eval()
    use_token_losses(model)
    adapted: PreTrainedModel | PeftModel = adapt(model)
    drop_other_stages(stage, causal_model(adapted))
    return adapted


def causal_model(model: PreTrainedModel | PeftModel) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def drop_other_stages(stage: PipelineStage, causal: Any) -> None:
    """Drop the layers of other stages; the decoder's own code runs the remaining ones."""
    decoder = causal.model
    kept = nn.ModuleList()
    for place in stage.layers:
        kept.add_module(str(place), decoder.layers[place])
    decoder.layers = kept
    decoder.config = stage_config(stage, decoder.config)
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config)
    if not stage.embeds:
        decoder.embed_tokens = None
    if not stage.last:
        decoder.norm = nn.Identity()
        causal.lm_head = None


def stage_config(stage: PipelineStage, config: Any) -> Any:
    """Return the configuration of this stage's layers.

    Some families look up each layer's type by index.
    """
    own = deepcopy(config)
    kinds = getattr(own, "layer_types", None)
    own.num_hidden_layers = len(stage.layers)
    if kinds:
        own.layer_types = [kinds[place] for place in stage.layers]
    return own


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Load this stage's weights of an adapter that was saved as a whole.

    Raises:
        BadConfiguration: the adapter belongs to another model.
    """
    files = ShardedTensors(sorted(folder.glob(ADAPTER_FILE)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            stored = stored_name(name, model)
            if files.shape(stored) != weight.shape:
                raise BadConfiguration(f"the adapter in {folder} does not fit the recipe: {stored} has another shape")
            weight.copy_(files.read(stored))


def save_adapter(model: PeftModel, parts: list[dict[str, torch.Tensor]], folder: Path) -> None:
    """Save the adapter of all stages in PEFT's format.

    PEFT itself would only save the layers it sees.
    """
    model.save_pretrained(str(folder), save_embedding_layers=False)
    whole = {stored_name(name, model): weight for part in parts for name, weight in part.items()}
    save_file(whole, folder / ADAPTER_FILE, {"format": "pt"})


def stored_name(name: str, model: PeftModel) -> str:
    """Return the name in an adapter file, which lacks the adapter's name in the model."""
    return name.replace(f".{model.active_adapter}.", ".")


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu() for name, weight in model.named_parameters() if weight.requires_grad}
