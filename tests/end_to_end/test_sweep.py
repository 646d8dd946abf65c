"""A real sweep: every trial is trained by the stack."""

import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import httpx
import pytest

from resources.hpo.sweep_step import trial_job_id
from resources.stack.detached_process import is_running
from tests.end_to_end.local_stack import LocalStack, wait_until
from tests.end_to_end.process_killer import coming_up, dying, kill

RATES = [1e-9, 1e-2, 1e-5, 1e-3]
AT_ONCE = 2
ROUNDS = 3
"""Number of kills after the first, which kills everything; a trial lasts no longer than one round."""


@dataclass(frozen=True)
class Searched:
    """A finished sweep, its trials by number, and the trainer count at each poll."""

    id: str
    found: dict[str, Any]
    trials: list[dict[str, Any]]
    in_training: list[int]


@pytest.fixture(scope="module")
def search(dataset: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a sweep whose trials train for four steps, each with its own rate."""
    short = {**parameters, "gradient_accumulation": 1, "batch_size": 2, "max_steps": 4, "eval_steps": 2}
    del short["learning_rate"]
    return {
        "experiment": "doors-sweep",
        "base_config": {"dataset": dataset, **short},
        "search_space": {"learning_rate": {"type": "choice", "values": RATES}},
        "strategy": "grid",
        "objective": {"metric": "eval/loss", "direction": "minimize"},
        "max_trials": len(RATES),
        "max_concurrent_trials": AT_ONCE,
        "early_stopping": {"patience": 3},
    }


@pytest.fixture(scope="module")
def undisturbed(stack: LocalStack, search: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Searched:
    return ended(stack, started(stack, search, tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.slow
def test_a_sweep_trains_its_trials_and_finds_the_best(stack: LocalStack, undisturbed: Searched) -> None:
    found = undisturbed.found
    assert (found["status"], found["trials"]) == ("completed", {"completed": len(RATES)}), found
    assert most_at_once(stack, undisturbed) == max(undisturbed.in_training) == AT_ONCE
    assert [trial["params"]["learning_rate"] for trial in undisturbed.trials] == RATES
    assert found["best_trial"]["number"] == 1
    for trial in undisturbed.trials:
        run = stack.get(f"/v1/runs/{trial['run_id']}")
        assert run["tags"]["mlflow.parentRunId"] == undisturbed.id
        assert run["params"]["eval_steps"] == "2"
        assert run["params"]["learning_rate"] == str(RATES[trial["number"]])
        last = next(point["value"] for point in run["metrics"] if point["key"] == "eval/loss")
        assert last == trial["value"]


@pytest.mark.requirement("K7")
@pytest.mark.slow
@pytest.mark.long
def test_sweep_survives_random_kills_with_equal_results(
    stack: LocalStack, search: dict[str, Any], undisturbed: Searched, tmp_path: Path
) -> None:
    """Kills every process of the stack at once, trainers too, then random ones.

    Each trial ends once, no more run at a time than allowed, and results are equal.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # to reproduce a failure
    chance = random.Random(seed)
    identifier = started(stack, search, tmp_path)
    time.sleep(chance.uniform(5, 20))
    for process in stack.processes():
        kill(process)
    killed: list[str] = []
    with dying(stack, chance, killed, ROUNDS), coming_up(stack, killed):
        survived = ended(stack, identifier)
    stack.hanzo_ml("up")
    print("\n".join(killed))
    assert killed
    assert (survived.found["status"], survived.found["trials"]) == ("completed", {"completed": len(RATES)}), survived.found
    assert survived.found["best_trial"]["number"] == undisturbed.found["best_trial"]["number"]
    results = [[(trial["params"], trial["value"]) for trial in sweep.trials] for sweep in (survived, undisturbed)]
    assert results[0] == results[1]
    jobs = {trial["run_id"]: like["run_id"] for trial, like in zip(survived.trials, undisturbed.trials, strict=True)}
    for job, like in jobs.items():
        assert stack.losses(job) == stack.losses(like)
        assert stack.adapter_sha256(job) == stack.adapter_sha256(like)
    once = ("job.submitted", "trial.started", "job.completed", "trial.completed")
    other = ("job.failed", "job.cancelled", "trial.failed", "trial.pruning", "trial.cancelling")
    events = Counter((event["type"], event["key"]) for event in stack.events(*once, *other) if event["key"] in jobs)
    assert events == Counter(product(once, jobs))
    assert most_at_once(stack, survived) == AT_ONCE
    assert max(survived.in_training) <= AT_ONCE
    assert len(stack.events("sweep.completed", key=identifier)) == 1


@pytest.mark.requirement("K3")
@pytest.mark.slow
def test_population_continues_with_the_weights_of_its_best_member(
    stack: LocalStack, dataset: str, parameters: dict[str, Any], tmp_path: Path
) -> None:
    """One of two members hardly learns, which distinguishes its descendant from a copy."""
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
        "seed": 3,  # the seed by which the two draw different rates
    }
    population = ended(stack, started(stack, sweep, tmp_path))
    assert (population.found["status"], population.found["trials"]) == ("completed", {"completed": 4}), population.found
    trials = population.trials
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


def ended(stack: LocalStack, identifier: str) -> Searched:
    """Wait for its end; the server may be unavailable in between."""
    in_training = [0]

    def over() -> Searched | None:
        in_training.append(sum(is_running(stack.trainer(trial_job_id(identifier, number))) for number in range(len(RATES))))
        try:
            found: dict[str, Any] = stack.get(f"/v1/hpo/{identifier}")
            if found["status"] == "running":
                return None
            return Searched(identifier, found, stack.get(f"/v1/hpo/{identifier}/trials")["trials"], in_training)
        except httpx.HTTPError:
            return None

    return wait_until("the end of the sweep", over, seconds=800, every=0.5)


def most_at_once(stack: LocalStack, sweep: Searched) -> int:
    """Return how many trials ran at the same time, by their events."""
    changes = {"trial.started": 1, "trial.completed": -1}
    jobs = {trial["run_id"] for trial in sweep.trials}
    return max(accumulate(changes[event["type"]] for event in stack.events(*changes) if event["key"] in jobs))
