"""A real sweep: every trial is trained by the stack."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chain.local_stack import LocalStack, wait_until


@pytest.mark.slow
def test_a_sweep_trains_its_trials_and_finds_the_best(
    stack: LocalStack, dataset: str, parameters: dict[str, Any], tmp_path: Path
) -> None:
    rates = [1e-9, 1e-2, 1e-5]
    short = {**parameters, "gradient_accumulation": 1, "batch_size": 2, "max_steps": 4, "eval_steps": 2}
    del short["learning_rate"]
    sweep = {
        "experiment": "doors-sweep",
        "base_config": {"dataset": dataset, **short},
        "search_space": {"learning_rate": {"type": "choice", "values": rates}},
        "strategy": "grid",
        "objective": {"metric": "eval/loss", "direction": "minimize"},
        "max_trials": len(rates),
        "max_concurrent_trials": 2,
        "early_stopping": {"patience": 3},
    }
    identifier = started(stack, sweep, tmp_path)

    at_once = []

    def ended() -> dict[str, Any] | None:
        found: dict[str, Any] = stack.get(f"/v1/hpo/{identifier}")
        at_once.append(sum(found["trials"].get(status, 0) for status in ("queued", "running", "pruning", "cancelling")))
        return found if found["status"] != "running" else None

    found = wait_until("the end of the sweep", ended, every=0.5)
    assert (found["status"], found["trials"]) == ("completed", {"completed": 3}), found
    assert max(at_once) == 2
    trials = stack.get(f"/v1/hpo/{identifier}/trials")["trials"]
    assert [trial["params"]["learning_rate"] for trial in trials] == rates
    assert found["best_trial"]["number"] == 1
    for trial in trials:
        run = stack.get(f"/v1/runs/{trial['run_id']}")
        assert run["tags"]["mlflow.parentRunId"] == identifier
        assert run["params"]["eval_steps"] == "2"
        assert run["params"]["learning_rate"] == str(rates[trial["number"]])
        last = next(point["value"] for point in run["metrics"] if point["key"] == "eval/loss")
        assert last == trial["value"]


@pytest.mark.slow
def test_a_population_goes_on_with_the_weights_of_its_best_member(
    stack: LocalStack, dataset: str, parameters: dict[str, Any], tmp_path: Path
) -> None:
    """Of two members one learns next to nothing, so that its descendant is told from a copy of the other."""
    rates = {"type": "choice", "values": [1e-12, 1e-2]}
    short = {**parameters, "gradient_accumulation": 1, "batch_size": 2, "max_steps": 8, "eval_steps": 2}
    del short["learning_rate"]
    sweep = {
        "experiment": "doors-population",
        "base_config": {"dataset": dataset, **short},
        "search_space": {"learning_rate": rates},
        "strategy": "pbt",
        "pbt": {"population": 2, "generations": 2},
        "objective": {"metric": "eval/loss", "direction": "minimize"},
        "max_trials": 4,
        "max_concurrent_trials": 2,
        "seed": 3,  # by which the two draw different rates
    }
    identifier = started(stack, sweep, tmp_path)

    def ended() -> dict[str, Any] | None:
        found: dict[str, Any] = stack.get(f"/v1/hpo/{identifier}")
        return found if found["status"] != "running" else None

    found = wait_until("the end of the sweep", ended, every=0.5)
    assert (found["status"], found["trials"]) == ("completed", {"completed": 4}), found
    trials = stack.get(f"/v1/hpo/{identifier}/trials")["trials"]
    assert [trial["params"]["learning_rate"] for trial in trials[:2]] == [1e-12, 1e-2]
    still, better, *descendants = trials
    assert better["value"] < still["value"]
    for trial in descendants:
        assert trial["start_from"] == better["number"]
        assert trial["value"] < still["value"]  # with either rate
        log = stack.hanzo_ml("job", "logs", trial["run_id"]).stdout
        assert f"starting from the weights of s3://hanzo-ml/runs/{better['run_id']}/" in log


def started(stack: LocalStack, sweep: dict[str, Any], folder: Path) -> str:
    file = folder / "sweep.yaml"
    file.write_text(json.dumps(sweep))
    identifier: str = json.loads(stack.hanzo_ml("hpo", "start", "--config", str(file), "--json").stdout)["id"]
    return identifier
