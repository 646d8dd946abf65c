"""What DeepSpeed's strategies need and how a whole tensor is shared out; that they train is in `test_processes`."""

import pytest
import torch

from recipes.recipe import Recipe
from recipes.schema import BadConfiguration
from recipes.training import machine
from recipes.training.zero import part_of


def test_without_deepspeed_its_strategies_are_refused_and_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    machine.refuse_what_the_machine_lacks(Recipe.named("smollm2-135m-lora"))
    shape = {"strategy": "deepspeed_zero2", "gpus_per_node": 2, "backend": "gloo"}
    with pytest.raises(BadConfiguration, match=r'pip install "hanzo-ml\[deepspeed\]", or use strategy fsdp'):
        machine.refuse_what_the_machine_lacks(Recipe.named("smollm2-135m-lora").changed({"distributed": shape}))


@pytest.mark.parametrize(("elements", "processes"), [(12, 3), (10, 4), (2, 4)])
def test_the_parts_of_all_processes_are_the_whole_and_zeros(elements: int, processes: int) -> None:
    whole = torch.arange(1.0, elements + 1).view(2, -1)
    size = -(-elements // processes)
    parts = torch.cat([part_of(whole, size, rank) for rank in range(processes)])
    assert parts.tolist() == [*range(1, elements + 1), *[0.0] * (size * processes - elements)]
