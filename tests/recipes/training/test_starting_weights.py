"""A run started from another run's weights has exactly these; other shapes are refused."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.contracts.job import BadConfiguration, Job
from recipes.contracts.recipe import Recipe
from recipes.storage.manifest import Artifact
from recipes.training.model import copy_weights
from tests.recipes.tiny_training import FULL, LORA, TinyTraining

STILL = 1e-30
"""Learning rate too small to change a weight: the final weights equal the initial ones."""


class Population(TinyTraining):
    """Runs that start from the weights `start`, if set."""

    start: Artifact | None = None

    def training_job(self, name: str, recipe: Recipe) -> Job:
        job = super().training_job(name, recipe)
        return job.model_copy(update={"inputs": {**job.inputs, "start": self.start}}) if self.start else job

    def trained(self, name: str, start: Artifact | None = None, **changed: Any) -> Artifact:
        self.start = start
        artifacts = self.train(name, **changed).artifacts
        return next(artifacts[role] for role in ("adapter", "weights") if role in artifacts)

    def weights(self, trained: Artifact) -> dict[str, str]:
        """Return the SHA-256 of each tensor's bytes, by name."""
        (file,) = self.fetch(trained).glob("*model.safetensors")
        tensors = load_file(file)
        return {name: hashlib.sha256(tensors[name].numpy().tobytes()).hexdigest() for name in tensors}


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Population:
    return Population(tmp_path_factory.mktemp("population"))


@pytest.mark.slow
@pytest.mark.parametrize("method", [LORA | {"lora_dropout": 0.0}, FULL], ids=["lora", "full"])
def test_run_started_from_weights_has_their_bytes_and_records_their_digest(
    members: Population, method: Mapping[str, Any]
) -> None:
    kind = method["method"]
    better = members.trained(f"{kind}-better", **{**method, "learning_rate": 0.05, "max_steps": 3})
    still = {**method, "learning_rate": STILL, "max_steps": 1, "seed": 7}
    copy = members.trained(f"{kind}-copy", better, **still)
    alone = members.trained(f"{kind}-alone", **still)
    assert members.weights(copy) == members.weights(better)
    assert members.weights(alone) != members.weights(better)
    assert members.store.manifest(copy).inputs["start"] == better.digest


@pytest.mark.slow
def test_own_checkpoint_takes_precedence_over_starting_weights(
    members: Population, capsys: pytest.CaptureFixture[str]
) -> None:
    start = members.trained("first", **LORA, max_steps=1)
    whole = members.trained("member", start, **LORA, max_steps=2)
    capsys.readouterr()
    again = members.trained("member", start, **LORA, max_steps=2)
    said = capsys.readouterr().out
    assert "resuming from checkpoint 2" in said and "starting from the weights" not in said
    assert members.weights(again) == members.weights(whole)


def test_starting_weights_that_do_not_fit_are_refused(members: Population) -> None:
    start = members.trained("rank-4", **LORA, max_steps=1)
    with pytest.raises(BadConfiguration, match=r"does not fit the recipe: .*lora_A.* has another shape"):
        members.trained("rank-8", start, **{**LORA, "lora_rank": 8}, max_steps=1)
    with pytest.raises(BadConfiguration, match="has no adapter"):
        members.trained("nothing", members.splits["train"], **LORA, max_steps=1)


def test_incomplete_or_surplus_weights_are_refused_and_tied_weights_copied_once(tmp_path: Path) -> None:
    """Otherwise a part of the model would silently be that of the base."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    tied: Any = torch.nn.Sequential(*model)
    tied.append(tied[1])
    first, second = torch.ones(2, 2), torch.full((4,), 2.0)  # DeepSpeed stores weights flat
    file = tmp_path / "model.safetensors"
    for tensors in ({"0.weight": first}, {"0.weight": first, "1.weight": second, "9.weight": first.clone()}):
        save_file(tensors, file)
        with pytest.raises(BadConfiguration, match=r"the other does not fit the recipe: [19]\.weight has another shape"):
            copy_weights(model, "the other", tmp_path)
    save_file({"0.weight": first, "1.weight": second}, file)
    with torch.no_grad():
        copy_weights(tied, "the other", tmp_path)
    assert tied[0].weight.equal(first) and tied[2].weight.equal(second.view(2, 2))
