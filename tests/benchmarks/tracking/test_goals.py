"""The tracking benchmark reports no unmeasured goal as met."""

from argparse import Namespace

import pytest

from benchmarks.tracking.cases import CASES, GOALS, Case
from benchmarks.tracking.goals import Idle, Result, Results, goals_missed, left_out, verdict
from benchmarks.tracking.servers import DURABILITY, KINDS

GOOD = Idle(1.0, 80.0)


def measured(**figures: float) -> Results:
    """Return results in which each server of `figures` is that many times worse."""
    return {(case.name, case.clients): {name: found(case, worse) for name, worse in figures.items()} for case in CASES}


def found(case: Case, worse: float) -> Result:
    return Result(1 / worse if case.more_is_better else worse, 1.0)


def everything() -> Namespace:
    return Namespace(database=list(DURABILITY), servers=list(KINDS), only=list(dict.fromkeys(case.name for case in CASES)))


@pytest.mark.parametrize("peer", GOALS)
def test_goal_is_missed_in_every_case_where_a_peer_is_too_close(peer: str) -> None:
    near, far = (measured(**{"ours": 1.0, peer: GOALS[peer] * by}) for by in (0.9, 1.1))
    assert len(goals_missed("sqlite", list(CASES), near, {"ours": GOOD})) == len(CASES)
    assert goals_missed("sqlite", list(CASES), far, {"ours": GOOD}) == []


@pytest.mark.parametrize(
    ("idle", "said"), [(Idle(1.5, 80.0), "healthy after 1.50 s"), (Idle(1.0, 120.0), "idle with 120.00 MB")]
)
@pytest.mark.parametrize("ours", ["ours", "ours-workers"])
def test_slow_start_or_high_memory_misses_the_goal(ours: str, idle: Idle, said: str) -> None:
    (line,) = goals_missed("sqlite", [], {}, {ours: idle, "mlflow": Idle(30.0, 900.0)})
    assert f"{ours} is {said}" in line


def test_goals_cover_both_mlflow_configurations() -> None:
    assert {"mlflow", "mlflow-1-worker", "fasttrackml"} == GOALS.keys() and GOALS.keys() <= KINDS.keys()


def test_unmeasured_cases_are_listed_and_not_counted_as_met() -> None:
    assert left_out(everything()) == []
    assert verdict([], []) == "every goal is met"
    asked = everything()
    asked.database, asked.only = ["sqlite"], ["search", "get-history"]
    asked.servers = ["ours", "ours-workers", "mlflow", "bare"]
    unknown = left_out(asked)
    assert unknown[:2] == ["  databases: postgresql", "  servers: mlflow-1-worker, fasttrackml"]
    assert "log-metric" in unknown[2] and "get-history" not in unknown[2]
    assert verdict([], unknown).startswith("every goal that was measured is met\nnot measured:\n  databases: postgresql\n")
    assert verdict(["  x"], unknown).startswith("MISSED:\n  x\nnot measured:\n")
