"""The estimated checkpoint size matches the actual size."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture
from recipes.planning.hardware_fit import checkpoint_bytes, describe_disk_usage
from recipes.planning.recipe_checks import resolve_shape
from tests.recipes.training.forked_processes import Forks
from tests.recipes.training.training_workspace import Place

SMALL = 4096
"""Upper bound of the header bytes per tensor of a file."""
OF_THE_MODEL = ("model", "adapter_model", "optimizer")


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_rank": 16},
        {"method": "full", "dtype": "float32"},
        {"method": "full", "dtype": "bfloat16"},
        {"method": "full", "dtype": "float32", "optimizer": "adamw_8bit"},
        pytest.param(
            {
                "method": "full",
                "dtype": "float32",
                "distributed": {"strategy": "fsdp", "gpus_per_node": 2, "backend": "gloo"},
                "batch_size": 2,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lora", "full", "bfloat16", "eight bits", "fsdp"],
)
def test_checkpoint_size_matches_estimate(place: Place, started: Forks, tmp_path: Path, changed: dict[str, Any]) -> None:
    changed = {"max_steps": 2, "eval_steps": None, **changed}
    recipe = place.recipe.changed(changed)
    work = tmp_path / f"size-{'-'.join(map(str, changed))}-{recipe.computing_dtype}"
    job = place.job(work, changed).model_copy(update={"distributed": recipe.distributed})
    started.train(job) if recipe.distributed else place.run(job, work)
    folder = work / "checkpoints" / "2"
    taken = sum(file.stat().st_size for file in folder.iterdir() if file.name.startswith(OF_THE_MODEL))
    model = Path(recipe.base_model.uri.removeprefix("file://"))
    shape = Architecture.from_config(AutoConfig.from_pretrained(model).to_dict())
    tensors = 3 * sum(part.copies for part in shape.tensors)
    reckoned = checkpoint_bytes(recipe, shape)
    assert reckoned <= taken <= reckoned + SMALL * tensors
    assert SMALL * tensors < reckoned


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        (
            "zen-72b-full",
            {},
            "812.6 GiB a checkpoint; each node's disk must hold two parts of 203.1 GiB (the first node's "
            "also all weights at the end), the store up to 5 checkpoints",
        ),
        (
            "zen-72b-full",
            {"distributed": {"strategy": "deepspeed_zero3", "num_nodes": 4, "gpus_per_node": 8}},
            "812.6 GiB a checkpoint; each node's disk must hold two parts of 203.1 GiB (and a complete one to resume from), "
            "the store up to 5 checkpoints",
        ),
        (
            "zen-7b-lora",
            {"checkpoint": {"compression": "zstd", "keep_last": 1}},
            "1.8 GiB a checkpoint; the disk must hold three of them, the store up to 3",
        ),
    ],
)
def test_disk_usage_is_described(name: str, changed: dict[str, Any], words: str) -> None:
    recipe = Recipe.named(name).changed(changed)
    assert describe_disk_usage(recipe, checkpoint_bytes(recipe, resolve_shape(recipe))) == words
