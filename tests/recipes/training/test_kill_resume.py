"""`kill -9` at random steps, for every trainable combination: the run ends bit-identical.

The table has all that runs without a GPU. `test_two_processes` covers the automatic restart whichever process is
killed, also for FSDP with tensor parallelism; `test_two_nodes` covers a lost node.
"""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from recipes.planning.recipe_checks import find_contradiction
from tests.recipes.training.forked_processes import Forks
from tests.recipes.training.parallel_strategies import rows_at_once, shape
from tests.recipes.training.training_workspace import Place, facts

ALONE = "alone"
STEPS = 10
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"lora_dropout": 0.1},
    "qlora": {
        "method": "qlora",
        "base_dtype": "nf4",
        "compute_dtype": "float32",
        "double_quant": True,
        "lora_dropout": 0.1,
    },
    "full": {"method": "full", "dtype": "float32", "learning_rate": 1e-3},
}
OBJECTIVES = ("sft", "dpo", "orpo")
STRATEGIES = {
    ALONE: ("lora", "qlora", "full"),
    "ddp": ("lora", "qlora", "full"),
    "fsdp": ("lora", "full"),
    "tensor": ("full",),
    "hybrid": ("full",),
    "deepspeed_zero2": ("lora", "full"),
    "deepspeed_zero3": ("lora", "full"),
    "pipeline": ("lora", "full"),
}
"""Methods that each strategy supports."""
LONG = {
    (ALONE, "full"),
    ("ddp", "qlora"),
    ("ddp", "full"),
    ("fsdp", "lora"),
    ("deepspeed_zero2", "lora"),
    ("deepspeed_zero3", "full"),
    ("pipeline", "full"),
}
"""Killed only by `make test-long`.

CI kills each strategy with one method, and each method with one strategy.
"""
TABLE = [
    (strategy, method, of)
    for strategy, methods in STRATEGIES.items()
    for method in methods
    for of in (OBJECTIVES if strategy != "pipeline" else ("sft",))
]


def settings_of(strategy: str, method: str, objective: str) -> dict[str, Any]:
    settings = {"objective": objective, "max_steps": STEPS, "eval_steps": 2, **METHODS[method]}
    if strategy == ALONE:
        return settings
    if strategy == "pipeline":
        settings |= {"batch_size": 1, "gradient_accumulation": 4}
    else:
        settings["batch_size"] = rows_at_once(strategy)
    return settings | {"distributed": shape(strategy, 2)}


def test_combinations_outside_the_table_are_refused(place: Place) -> None:
    everything = product(STRATEGIES, METHODS, OBJECTIVES)
    recipes = {each: place.recipe.changed(settings_of(*each)) for each in everything}
    assert [each for each, recipe in recipes.items() if find_contradiction(recipe, None) is None] == TABLE


@pytest.mark.requirement("I2", "I9")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        pytest.param(strategy, method, marks=[pytest.mark.long] if (strategy, method) in LONG else [])
        for strategy, methods in STRATEGIES.items()
        for method in methods
    ],
)
def test_killed_run_ends_bit_identical(place: Place, started: Forks, tmp_path: Path, strategy: str, method: str) -> None:
    """Each run uses one random objective, since objectives differ only in their loss.

    All combinations took CI ten minutes.
    """
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    objective = chance.choice([of for *how, of in TABLE if how == [strategy, method]])
    print(f"seed {seed}: {objective}")  # to reproduce a failure
    settings = settings_of(strategy, method, objective)
    whole, killed = (
        place.job(tmp_path / f"{strategy}-{method}-{objective}-{name}", settings).model_copy(
            update={"distributed": place.recipe.changed(settings).distributed}
        )
        for name in ("whole", "killed")
    )
    undisturbed = started.train(whole)
    started.kill(killed, 4 + chance.randrange(4), chance)
    result = started.train(killed)
    assert (facts(result).resumed_from or 0) >= 2
    assert facts(result).losses == facts(undisturbed).losses and len(facts(result).losses) == STEPS
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in undisturbed.artifacts.items()
    }
