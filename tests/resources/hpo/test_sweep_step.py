"""Decisions of a sweep, against simulated trials with a known loss."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from resources.hpo.early_stopping import TrialHistory, find_stops
from resources.hpo.search_space import Params
from resources.hpo.strategies import generation_steps, suggest_trials
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.sweep_plots import history_page, parallel_coordinates_page
from resources.hpo.sweep_step import Step, decide_next_step
from resources.hpo.trial import Observation, Point, Trial, rank_trials
from resources.hpo.trial_job import build_trial_job
from tests.resources.hpo.sweep_files import SPECIFIED, small, sweep

SWEEP_ID = "0" * 32
RUNG = 10
Loss = Callable[[Params, int], float]


def bowl(params: Params, step: int) -> float:
    """Return a loss, best at a learning rate of 1e-3 and falling with every step."""
    return (math.log10(float(params["learning_rate"])) + 3) ** 2 + 1 / step


class World:
    """Simulate trials that advance by one evaluation per round and end as configured."""

    def __init__(self, config: SweepConfig, loss: Loss = bowl, fails: Callable[[int], bool] = lambda number: False) -> None:
        self.config, self.loss, self.fails = config, loss, fails
        self.trials: dict[int, Trial] = {}
        self.evaluations: dict[int, int] = {}
        self.most_at_once = 0
        self.end: Step | None = None

    def steps(self) -> int:
        return generation_steps(self.config) if self.config.strategy == "pbt" else 40

    def observe(self, trial: Trial) -> Observation:
        seen = self.evaluations[trial.number]
        points = tuple(Point(RUNG * at, self.loss(trial.params, RUNG * at)) for at in range(1, seen + 1))
        if self.fails(trial.number):
            return Observation("failed", "it broke", points)
        return Observation("completed" if RUNG * seen >= self.steps() else "running", "", points)

    def round(self) -> None:
        for trial in self.trials.values():
            if trial.status == "running":
                self.evaluations[trial.number] += 1
        known = [self.trials[number] for number in sorted(self.trials)]
        step = decide_next_step(SWEEP_ID, self.config, known, {trial.number: self.observe(trial) for trial in known}, 1)
        again = decide_next_step(SWEEP_ID, self.config, known, {trial.number: self.observe(trial) for trial in known}, 1)
        assert step == again, "a repeated decision is the same"
        for trial in (*step.changed, *step.new_trials):
            self.trials[trial.number] = trial
            self.evaluations.setdefault(trial.number, 0)
        self.most_at_once = max(self.most_at_once, sum(not trial.has_ended for trial in self.trials.values()))
        self.end = step if step.end else None

    def run(self) -> list[Trial]:
        for _ in range(1000):
            self.round()
            if self.end is not None:
                return [self.trials[number] for number in sorted(self.trials)]
        raise AssertionError("it never ended")

    @property
    def status(self) -> str:
        assert self.end is not None and self.end.end is not None
        return self.end.end.status


GRID = {"learning_rate": {"type": "log_uniform", "min": 1e-5, "max": 1e-1, "points": 5}}


@pytest.mark.parametrize("strategy", ["grid", "random", "bayesian", "pbt", "successive_halving"])
def test_a_sweep_does_all_its_trials_and_never_more_at_once_than_allowed(strategy: str) -> None:
    config = sweep(strategy=strategy, search_space=GRID, max_trials=12, max_concurrent_trials=3)
    world = World(config)
    trials = world.run()
    assert world.status == "completed"
    assert len(trials) == (5 if strategy == "grid" else 12)
    assert world.most_at_once == 3
    assert len({trial.job_id for trial in trials}) == len(trials)


LISTS: list[Any] = [["q_proj"], ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], None, "all"]


@pytest.mark.parametrize(
    "new_trials", ["grid tpe", "random tpe", "bayesian tpe", "bayesian gp", "pbt tpe", "successive_halving tpe"]
)
def test_choice_may_contain_lists_and_null(new_trials: str) -> None:
    """People search over target modules; a trial is identified by its values in JSON."""
    strategy, sampler = new_trials.split()
    space = {"modules": {"type": "choice", "values": LISTS}}
    config = sweep(strategy=strategy, sampler=sampler, search_space=space, max_trials=18, max_concurrent_trials=3)
    trials = World(config, lambda params, step: 1 / step + LISTS.index(params["modules"])).run()
    tried = [trial.params["modules"] for trial in trials]
    assert all(value in LISTS for value in tried) and any(isinstance(value, list) for value in tried)
    if strategy == "grid":
        assert tried == LISTS
    stored = [replace(trial, params=json.loads(json.dumps(trial.params))) for trial in trials]
    again = SweepConfig.model_validate_json(config.model_dump_json())
    assert again == config and suggest_trials(again, stored[:12], 3) == suggest_trials(config, trials[:12], 3)
    for page in (history_page(config, stored), parallel_coordinates_page(config, stored)):
        assert "modules [q_proj" in page
    assert build_trial_job(config, trials[0].params)["parameters"]["modules"] == tried[0]


@pytest.mark.requirement("K6")
def test_a_failed_trial_does_not_end_the_sweep_and_is_not_the_best() -> None:
    world = World(sweep(), fails=lambda number: number in (0, 3))
    trials = world.run()
    assert world.status == "completed"
    assert [trial.status for trial in trials].count("failed") == 2
    assert trials[0].reason == "it broke"
    assert rank_trials(trials, "minimize")[0].number not in (0, 3)


def test_a_sweep_whose_trials_all_failed_has_failed_and_says_why() -> None:
    world = World(sweep(max_trials=3), fails=lambda number: True)
    world.run()
    assert world.status == "failed"
    assert world.end is not None and world.end.end is not None and "it broke" in world.end.end.reason


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ((), "its run logged no 'eval/loss'"),
        ((Point(10, math.nan),), "it diverged: the last 'eval/loss' of its run, at step 10"),
        ((Point(10, 1.0), Point(20, math.inf)), "it diverged: the last 'eval/loss' of its run, at step 20"),
    ],
)
def test_trial_without_a_finite_objective_fails_with_its_cause(points: tuple[Point, ...], why: str) -> None:
    """Regression: the reason of a diverged trial claimed that nothing was logged."""
    config = sweep(max_trials=1)
    (trial,) = decide_next_step(SWEEP_ID, config, [], {}, 1).new_trials
    (changed,) = decide_next_step(SWEEP_ID, config, [trial], {0: Observation("completed", "", points)}, 2).changed
    assert changed.status == "failed" and changed.reason.startswith(why)


@pytest.mark.requirement("K3", "Z13")
@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_bayesian_search_learns_where_random_search_does_not(sampler: str) -> None:
    def tried(strategy: str, seed: int) -> float:
        config = sweep(strategy=strategy, sampler=sampler, max_trials=30, max_concurrent_trials=2, seed=seed)
        late = World(config).run()[20:]
        return sum(bowl(trial.params, 40) for trial in late) / len(late)

    assert sum(tried("bayesian", seed) for seed in (1, 2)) < 0.5 * sum(tried("random", seed) for seed in (1, 2))


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_trials_that_run_at_once_do_not_try_the_same(sampler: str) -> None:
    config = sweep(strategy="bayesian", sampler=sampler, max_trials=30, max_concurrent_trials=4)
    done = [
        replace(trial, status="completed", value=bowl(trial.params, 40), step=40)
        for trial in decide_next_step(SWEEP_ID, sweep(max_trials=20, max_concurrent_trials=20), [], {}, 1).new_trials
    ]
    rates = [suggestion.params["learning_rate"] for suggestion in suggest_trials(config, done, 4)]
    assert len(set(rates)) == 4


def test_stalled_trial_is_pruned_and_keeps_its_slot_until_it_has_stopped() -> None:
    base = {**sweep().base_config, "max_steps": 80}
    early = {"patience": 3, "min_delta": 0.001}
    config = sweep(base_config=base, early_stopping=early, max_trials=2, max_concurrent_trials=1)
    (trial,) = decide_next_step(SWEEP_ID, config, [], {}, 1).new_trials
    flat = tuple(Point(10 * at, 0.5 - 0.0001 * at) for at in range(1, 5))
    assert not decide_next_step(SWEEP_ID, config, [trial], {0: Observation("running", "", flat[:3])}, 2)
    step = decide_next_step(SWEEP_ID, config, [trial], {0: Observation("running", "", flat)}, 2)
    (stopped,) = step.changed
    assert stopped.status == "pruning" and stopped.reason == "no improvement of more than 0.001 in 3 evaluations"
    assert step.new_trials == ()
    assert not decide_next_step(SWEEP_ID, config, [stopped], {0: Observation("cancelled", "", flat, is_stopped=False)}, 3)
    after = decide_next_step(SWEEP_ID, config, [stopped], {0: Observation("cancelled", "", flat)}, 3)
    assert [trial.status for trial in after.changed] == ["pruned"] and after.changed[0].value == flat[-1].value
    assert [trial.number for trial in after.new_trials] == [1]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 40),
        ({"base_config": {"dataset": "d", "recipe": "smollm2-135m-lora"}}, 90),
        ({"base_config": {"dataset": "d", "parameters": {"max_steps": 30}}}, 30),
        ({"base_config": {"dataset": "d"}, "search_space": {"max_steps": {"type": "choice", "values": [50]}}}, 50),
        ({"strategy": "pbt", "pbt": {"population": 1, "generations": 2}}, 20),
        ({"strategy": "successive_halving", "max_trials": 2}, 40),
    ],
)
def test_trial_that_completed_its_steps_is_not_pruned_while_publishing(changes: dict[str, Any], steps: int) -> None:
    config = sweep(**{"early_stopping": {"patience": 1, "min_delta": 0.001}, **changes})
    trial, *_ = decide_next_step(SWEEP_ID, config, [], {}, 1).new_trials
    for last, stopped in ((steps - 1, True), (steps, False)):
        look = Observation("running", "", (Point(last - 10, 0.5), Point(last, 0.6)))
        assert bool(decide_next_step(SWEEP_ID, config, [trial], {0: look}, 2).changed) == stopped


def luck(number: int, step: int) -> float:
    """Return a loss that falls with occasional increases."""
    return 1 / step + random.Random(f"{number}/{step}").uniform(0, 0.2)


def ended(config: SweepConfig, looks: Sequence[int], last: Mapping[int, int]) -> list[tuple[Any, ...]]:
    """Return how concurrent trials end when polled at the times in `looks`.

    All start at once and evaluate every 10 of 80 steps, each at its own pace. Those in `last` fail after the given
    step.
    """
    trials = list(decide_next_step(SWEEP_ID, config, [], {}, 0).new_trials)
    for now in looks:
        observed = {}
        for number in range(len(trials)):
            steps, pace = last.get(number, 80), 7 + number * 5 % 4
            points = tuple(Point(step, luck(number, step), step * pace) for step in range(10, steps + 1, 10))
            status = "running" if now < steps * pace else "failed" if number in last else "completed"
            observed[number] = Observation(status, "", tuple(point for point in points if point.time <= now))
        for trial in decide_next_step(SWEEP_ID, config, trials, observed, now).changed:
            trials[trial.number] = trial
    return [(trial.status, trial.value, trial.step, trial.reason) for trial in trials]


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"early_stopping": {"patience": 2, "min_delta": 0.0}}, {}),
        ({"early_stopping": {"patience": 2, "min_delta": 0.0}}, dict.fromkeys(range(0, 12, 2), 70)),
        ({"strategy": "successive_halving"}, {}),
        ({"strategy": "successive_halving", "early_stopping": {"patience": 3, "min_delta": 0.0}}, {}),
    ],
    ids=["patience", "patience-and-failures", "halving", "halving-and-patience"],
)
def test_pruning_is_independent_of_the_polling_interval(changes: dict[str, Any], last: dict[int, int]) -> None:
    """Regression: the result depended on whether a poll saw the step that met the rule.

    A trial that met the rule between two polls continued, or was stopped with later values.
    """
    base = {**sweep().base_config, "max_steps": 80}
    config = sweep(base_config=base, max_trials=12, max_concurrent_trials=12, **changes)
    often = ended(config, range(1, 1000), last)
    assert {status for status, *_ in often} >= {"pruned", "failed" if last else "completed"}
    assert len({step for status, _, step, _ in often if status == "pruned"}) > 1
    for looks in (range(7, 1000, 150), range(99, 1000, 300), [998, 999]):
        assert ended(config, looks, last) == often


def test_last_evaluation_does_not_prune_a_completed_trial_of_unknown_length() -> None:
    """Only the asset graph knows how long a model definition's own recipe trains."""
    config = sweep(base_config={"model": "m"}, early_stopping={"patience": 1, "min_delta": 0.0})
    trial, *_ = decide_next_step(SWEEP_ID, config, [], {}, 1).new_trials
    for worse, status in ((30, "completed"), (20, "pruned")):
        points = tuple(Point(step, 1.0 if step == worse else 1 / step) for step in (10, 20, 30))
        (changed,) = decide_next_step(SWEEP_ID, config, [trial], {0: Observation("completed", "", points)}, 2).changed
        assert (changed.status, changed.step) == (status, worse)


def test_early_stopping_follows_the_direction_of_the_objective() -> None:
    early = {"patience": 2, "min_delta": 0.0}
    rising = tuple(Point(at, float(at)) for at in range(1, 6))
    for direction, is_stopped in (("maximize", False), ("minimize", True)):
        config = sweep(early_stopping=early, objective={"metric": "m", "direction": direction})
        trial = decide_next_step(SWEEP_ID, config, [], {}, 1).new_trials[0]
        changed = decide_next_step(SWEEP_ID, config, [trial], {0: Observation("running", "", rising)}, 2).changed
        assert bool(changed) == is_stopped


@pytest.mark.requirement("K5", "Z13")
def test_successive_halving_gives_the_steps_to_the_best() -> None:
    config = sweep(strategy="successive_halving", max_trials=27, max_concurrent_trials=9)
    world = World(config)
    trials = world.run()
    pruned = [trial for trial in trials if trial.status == "pruned"]
    assert len(pruned) >= 15
    assert all("not among the best 1 in 3 at step" in trial.reason for trial in pruned)
    best = rank_trials(trials, "minimize")[0]
    assert best.status == "completed"
    assert bowl(best.params, 40) == min(bowl(trial.params, 40) for trial in trials)
    assert sum(trial.step or 0 for trial in trials) < 0.6 * 27 * 40


def stopped(config: SweepConfig, *points: tuple[Point, ...]) -> dict[int, str]:
    """Return the stop reason of each running trial to be stopped, by number."""
    found = find_stops({number: TrialHistory(each) for number, each in enumerate(points)}, config)
    return {number: stop.reason for number, stop in found.items()}


def test_halving_promotes_top_third_or_only_the_best_of_a_small_rung() -> None:
    """Test a trial that reaches the rung last, at every rank."""
    config = sweep(strategy="successive_halving", successive_halving={"reduction_factor": 3, "min_steps": RUNG})
    for there, kept in {1: 1, 2: 1, 3: 1, 5: 1, 6: 2, 8: 2, 9: 3}.items():
        others = {at: TrialHistory((Point(RUNG, float(at)),), may_stop=False) for at in range(there - 1)}
        for place in range(there):
            last = TrialHistory((Point(RUNG, place - 0.5),))
            assert (there not in find_stops({**others, there: last}, config)) == (place < kept)


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_diverged_trial_is_never_promoted_in_either_direction(direction: str) -> None:
    """Regression: a trial that diverged to infinity won when maximizing and stopped all others."""
    objective = {"metric": "eval/loss", "direction": direction}
    config = sweep(strategy="successive_halving", successive_halving={"min_steps": RUNG}, objective=objective)
    for value in (math.inf, -math.inf, math.nan):
        finite, diverged = Point(RUNG, 1.0), Point(RUNG, value)
        assert stopped(config, (diverged,), (finite,)) == {}
        assert stopped(config, (finite,), (diverged,)).keys() == {1}


def test_no_trial_is_stopped_for_one_that_failed_later() -> None:
    """Regression: the best trial of the first rung failed after stopping all others.

    The sweep was left without any model.
    """
    config = sweep(
        strategy="successive_halving", max_trials=5, max_concurrent_trials=1, successive_halving={"min_steps": RUNG}
    )
    world = World(config, loss=lambda params, step: 1.0, fails=lambda number: number == 0 and world.evaluations[0] > 1)
    world.loss = lambda params, step: 0.0 if params == world.trials[0].params else float(params["learning_rate"])
    trials = world.run()
    assert trials[0].status == "failed" and trials[0].step == 2 * RUNG
    assert [trial.status for trial in trials].count("completed") >= 1, [trial.reason for trial in trials]
    assert world.end is not None and world.end.end is not None and world.end.end.reason == ""


@pytest.mark.parametrize("ended", ["failed", "cancelled"])
def test_trial_is_not_judged_by_trials_that_end_without_a_model_in_the_same_poll(ended: str) -> None:
    """Five trials with a value remain, of which one in three continues.

    The last trial has logged nothing yet.
    """
    changes = {"max_trials": 8, "max_concurrent_trials": 8, "successive_halving": {"min_steps": RUNG}}
    config = sweep(strategy="successive_halving", **changes)
    trials = decide_next_step(SWEEP_ID, config, [], {}, 1).new_trials
    looks = {at: Observation("running" if at > 1 else ended, "", (Point(RUNG, float(at)),)) for at in range(7)}
    step = decide_next_step(SWEEP_ID, config, trials, {**looks, 7: Observation("running")}, 2)
    assert [trial.number for trial in step.changed if trial.status == "pruning"] == [3, 4, 5, 6]
    assert {trial.number for trial in trials} - {trial.number for trial in step.changed} == {2, 7}


def test_rung_between_evaluations_is_judged_at_the_next_evaluation() -> None:
    """The rung is at the configured step, not at the trials' first evaluation."""
    config = sweep(strategy="successive_halving", successive_halving={"min_steps": RUNG + 2})
    early, late = ((Point(RUNG, at_first), Point(2 * RUNG, then)) for at_first, then in ((0.0, 5.0), (9.0, 1.0)))
    assert stopped(config, early[:1], late[:1]) == {}
    assert stopped(config, late, early) == {1: f"not among the best 1 in 3 at step {RUNG + 2}"}
    assert stopped(config, early, late) == {}


def test_worst_members_of_a_population_become_perturbed_copies_of_the_best() -> None:
    config = sweep(strategy="pbt", pbt={"population": 6, "generations": 3}, max_trials=18, max_concurrent_trials=4)
    trials = World(config).run()
    assert [trial.generation for trial in trials] == [0] * 6 + [1] * 6 + [2] * 6
    assert all(trial.start_from is None for trial in trials[:6])
    for generation in (1, 2):
        before = {trial.number: trial for trial in trials if trial.generation == generation - 1}
        order = [trial.number for trial in rank_trials(list(before.values()), "minimize")]
        for trial in (trial for trial in trials if trial.generation == generation):
            assert trial.start_from is not None
            own = next(number for number, other in before.items() if other.member == trial.member)
            source = before[trial.start_from]
            ratio = float(trial.params["learning_rate"]) / float(source.params["learning_rate"])
            if own in order[:4]:
                assert (trial.start_from, ratio) == (own, 1.0)
            else:
                assert trial.start_from in order[:2]
                assert ratio == pytest.approx(0.8) or ratio == pytest.approx(1.2)
    assert build_trial_job(config, trials[0].params)["parameters"]["max_steps"] == 14


def test_failed_member_is_replaced_and_a_fully_failed_population_ends_the_sweep() -> None:
    config = sweep(strategy="pbt", pbt={"population": 3, "generations": 2}, max_trials=6, max_concurrent_trials=3)
    trials = World(config, fails=lambda number: number == 1).run()
    heir = next(trial for trial in trials if (trial.generation, trial.member) == (1, 1))
    assert heir.start_from in (0, 2)
    dead = World(config, fails=lambda number: True)
    assert len(dead.run()) == 3 and dead.status == "failed"


@pytest.mark.requirement("K2")
def test_sweep_of_the_specification_creates_jobs_of_its_recipe() -> None:
    config = SweepConfig.model_validate(yaml.safe_load(SPECIFIED))
    trials = decide_next_step(SWEEP_ID, config, [], {}, 1).new_trials
    assert len(trials) == 4
    for trial in trials:
        assert 1e-6 <= float(trial.params["learning_rate"]) <= 1e-3
        assert trial.params["lora_rank"] in (8, 16, 32, 64, 128)
        job = build_trial_job(config, trial.params)
        assert (job["model"], job["recipe"], job["dataset"]) == ("sandbox", "zen-7b-lora", "instruction-v2")
        assert job["parameters"] == {
            "max_steps": 5000,
            "eval_steps": 500,
            "hardware": {"gpus": 1, "gpu_type": "nvidia-a100-80gb", "memory": "64Gi", "cpu": None},
            **trial.params,
        }


def test_sweep_defaults_are_those_of_the_specification() -> None:
    asked = small(early_stopping={}, objective={"metric": "eval/loss"})
    for key in ("strategy", "max_trials", "max_concurrent_trials"):
        del asked[key]
    config = SweepConfig.model_validate(asked)
    assert (config.strategy, config.sampler, config.max_trials, config.max_concurrent_trials) == ("bayesian", "tpe", 50, 8)
    assert config.early_stopping is not None and config.objective.direction == "minimize"
    assert (config.early_stopping.patience, config.early_stopping.min_delta) == (3, 0.001)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": "grid"}, "needs `points`"),
        ({"strategy": "grid", "search_space": GRID, "max_trials": 4}, "the grid has 5 combinations and max_trials is 4"),
        (
            {"strategy": "pbt", "search_space": {"lora_rank": {"type": "choice", "values": [8, 16]}}},
            "copies weights, and lora_rank changes their shape",
        ),
        ({"strategy": "pbt", "base_config": {"dataset": "d"}}, "needs base_config.max_steps"),
        ({"strategy": "successive_halving", "base_config": {"dataset": "d"}}, "needs successive_halving.min_steps"),
        ({"search_space": {"max_steps": {"type": "choice", "values": [1, 2]}}}, "is in base_config and in search_space"),
        ({"search_space": {}}, "at least 1"),
        ({"max_trials": True}, "must be a number: YAML reads yes, on and true as true"),
        ({"max_trails": 3}, "Extra inputs are not permitted"),
    ],
)
def test_invalid_sweep_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        sweep(**changes)


def test_plots_show_every_trial_with_a_value_and_escape_user_text() -> None:
    space = {**GRID, "name<b>": {"type": "choice", "values": ["<x>", "y"]}}
    config = sweep(search_space=space, max_trials=5, experiment="<script>")
    trials = World(config, fails=lambda number: number == 2).run()
    for page in (history_page(config, trials), parallel_coordinates_page(config, trials)):
        assert "<script>" not in page and "name<b>" not in page and "<x>" not in page
        assert page.count("<title>trial ") == 4
        assert "Best: trial " in page
    assert "No trial has a value yet" in history_page(config, [])


def test_a_value_on_an_axis_stays_inside_the_picture() -> None:
    chance = random.Random(3)
    config = sweep(search_space=GRID)
    trials = [
        Trial(number, "", {"learning_rate": 10 ** chance.uniform(-5, -1)}, "completed", 1, value=7.0, step=1)
        for number in range(5)
    ]
    page = parallel_coordinates_page(config, trials)
    heights = [float(pair.split(",")[1]) for line in page.split('points="')[1:] for pair in line.split('"')[0].split(" ")]
    assert heights and all(60 <= height <= 380 for height in heights)
