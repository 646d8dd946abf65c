"""What a recipe asks of the machine that it trains on: the rest is refused, or told, before anything is loaded."""

from importlib.util import find_spec

import torch

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.counted import counted
from recipes.launch import zero_stage
from recipes.runner import say


def refuse_what_the_machine_lacks(recipe: Recipe) -> None:
    """Raises BadConfiguration: the recipe needs a GPU, or DeepSpeed, and there is none."""
    # bitsandbytes 0.50 would take the plain optimizer in its stead on a processor, with no more than a warning.
    if recipe.optimizer == "paged_adamw" and not torch.cuda.is_available():
        raise BadConfiguration(
            f"recipe '{recipe.name}': optimizer paged_adamw moves pages between a GPU and the host, and there is no GPU "
            "here: use adamw or adamw_8bit"
        )
    if zero_stage(recipe) and find_spec("deepspeed") is None:
        raise BadConfiguration(
            f"recipe '{recipe.name}': DeepSpeed is not installed here: pip install \"hanzo-ml[deepspeed]\", or use strategy "
            "fsdp, which shards as much"
        )


def tell_that_there_is_no_gpu(recipe: Recipe) -> None:
    """Where a recipe wants one. It trains all the same; whoever has a GPU whose driver fails must see why it is so slow."""
    if recipe.hardware.gpus and not torch.cuda.is_available():
        wanted = counted(recipe.hardware.gpus, "GPU")
        say(f"the recipe asks for {wanted}, and PyTorch finds none here: training on the processor")
