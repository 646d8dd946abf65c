"""Evaluate a measurement: missed goals, and goals that were not measured."""

from argparse import Namespace
from dataclasses import dataclass

from benchmarks.tracking.cases import CASES, GOALS, MEMORY_GOAL, START_GOAL, Case
from benchmarks.tracking.servers import DURABILITY

OURS = ("ours", "ours-workers")


@dataclass(frozen=True)
class Result:
    """Medians of the rounds: the case's figure, and processor milliseconds per call.

    The processor time includes the database server's.
    """

    figure: float
    processor: float


@dataclass(frozen=True)
class Idle:
    """An idle server before any request: seconds until healthy, and memory in MB."""

    ready_after: float
    memory: float


Results = dict[tuple[str, int], dict[str, Result]]
"""Name and clients of a case -> server -> result."""


def times(case: Case, results: dict[str, Result], ours: str, theirs: str) -> float:
    """Return how many times better ours is."""
    mine, rival = results[ours].figure, results[theirs].figure
    return mine / rival if case.more_is_better else rival / mine


def goals_missed(database: str, cases: list[Case], results: Results, idle: dict[str, Idle]) -> list[str]:
    ratios = [
        f"  {database}, {case.name}, {case.clients} clients: {ours} is {ratio:.1f}x {name}, the goal is {goal:.0f}x"
        for case in cases
        for name, goal in GOALS.items()
        for ours in OURS
        if {ours, name} <= (found := results[case.name, case.clients]).keys()
        and (ratio := times(case, found, ours, name)) < goal
    ]
    figures = [
        (ours, what, figure, goal, unit)
        for ours in OURS
        if ours in idle
        for what, figure, goal, unit in (
            ("healthy after", idle[ours].ready_after, START_GOAL, "s"),
            ("idle with", idle[ours].memory, MEMORY_GOAL, "MB"),
        )
    ]
    return ratios + [
        f"  {database}: {ours} is {what} {figure:.2f} {unit}, the goal is under {goal:g} {unit}"
        for ours, what, figure, goal, unit in figures
        if figure >= goal
    ]


def left_out(options: Namespace) -> list[str]:
    """Return what the goals cover but the options exclude."""
    asked = (
        ("databases", DURABILITY, options.database),
        ("servers", (*OURS, *GOALS), options.servers),
        ("cases", dict.fromkeys(case.name for case in CASES), options.only),
    )
    missing = [(what, [name for name in goals if name not in chosen]) for what, goals, chosen in asked]
    return [f"  {what}: {', '.join(names)}" for what, names in missing if names]


def verdict(missed: list[str], unknown: list[str]) -> str:
    said = ["MISSED:", *missed] if missed else [f"every goal {'that was measured ' if unknown else ''}is met"]
    return "\n".join([*said, *(["not measured:", *unknown] if unknown else [])])
