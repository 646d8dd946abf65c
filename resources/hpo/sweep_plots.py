"""A sweep's pictures as pages that need no other file: its history, and all hyperparameters side by side. Pure functions."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import quantiles

from recipes.counted import counted
from resources.hpo.search_space import Choice, Dimension, LogUniform, Value, number_in, share_of, share_of_axis
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import Trial, ranked

WIDTH, HEIGHT = 960, 420
BETWEEN = 150
"""Pixels from one axis to the next, at least: a name is wider than a line."""
LETTER = 7
MOST_MARKS = 20
"""On one axis: of a longer choice every second, or third, value is written beside it."""
LEFT, RIGHT, TOP, BOTTOM = 70, 90, 60, 40
GOOD, BAD, AXIS = (79, 67, 221), (222, 224, 232), "#c9ccd6"
TICKS = 5
MOST_POWERS = 11
"""Of ten, on one axis."""
ROUNDED = 1e-9
"""How far the logarithm of a power of ten may lie from a whole number."""
ROOM = 0.06
"""Of an axis, that a text takes."""
FAR = 3.0
"""A value that is worse than the worse quartile by more than so many times their distance is far out (Tukey 1977)."""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: system-ui, sans-serif; margin: 2rem; color: #23262e }}
p {{ color: #5b6170 }} svg text {{ font-size: 12px; fill: #5b6170; paint-order: stroke; stroke: white; stroke-width: 3px }}
polyline:hover {{ stroke: #f2a541; stroke-width: 4 }}
</style></head><body><h1>{title}</h1><p>{words}</p>
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
{picture}</svg>
</body></html>
"""


@dataclass(frozen=True)
class Values:
    """The axis of the objective. What is far worse than the others lies at its end: one trial that diverged made one line of
    all others.
    """

    low: float
    high: float
    least: str
    most: str

    @classmethod
    def of(cls, values: Sequence[float], direction: str) -> "Values":
        there = sorted(values)
        first, _, third = quantiles(there, n=4, method="inclusive") if len(there) > 1 else (there[0],) * 3
        reach = FAR * (third - first)
        if direction == "minimize":
            high = there[bisect_right(there, third + reach) - 1] if reach else there[-1]
            return cls(there[0], high, f"{there[0]:.5g}", f"{'≥ ' if high < there[-1] else ''}{high:.5g}")
        low = there[bisect_left(there, first - reach)] if reach else there[0]
        return cls(low, there[-1], f"{'≤ ' if low > there[0] else ''}{low:.5g}", f"{there[-1]:.5g}")

    @property
    def marks(self) -> list[tuple[float, str]]:
        """What is written beside the axis, and where."""
        return [(0.0, self.least), (1.0, self.most)] if self.high > self.low else [(self.share(self.low), self.least)]

    def share(self, value: float) -> float:
        return min(max(share_of(value, self.low, self.high), 0.0), 1.0)


def history_page(config: SweepConfig, trials: Sequence[Trial]) -> str:
    """The value of each trial in the order of trials, and the best so far as a line."""
    shown = sorted(ranked(trials, config.objective.direction), key=lambda trial: trial.number)
    if not shown:
        return page(config, trials, "history", "")
    values = [trial.value for trial in shown if trial.value is not None]
    scale = Values.of(values, config.objective.direction)
    last = max(trial.number for trial in trials)

    def place(number: int, value: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * number / max(last, 1), height_of(scale.share(value))

    better = min if config.objective.direction == "minimize" else max
    best, line, dots = values[0], [], []
    for trial, value in zip(shown, values, strict=True):
        best = better(best, value)
        line.append("{:.1f},{:.1f}".format(*place(trial.number, best)))
        x, y = place(trial.number, value)
        hollow = "" if trial.status == "completed" else ' fill-opacity="0.35"'
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="rgb{GOOD}"{hollow}><title>{words_of(trial)}</title></circle>'
        )
    floor = HEIGHT - BOTTOM
    picture = (
        f'<path d="M{LEFT},{TOP} V{floor} H{WIDTH - RIGHT}" stroke="{AXIS}" fill="none"/>'
        + "".join(
            f'<text x="{LEFT - 8}" y="{height_of(at) + 4:.1f}" text-anchor="end">{text}</text>'
            for at, text in reversed(scale.marks)
        )
        + f'<text x="{LEFT}" y="{floor + 22}">trial 0</text>'
        + (f'<text x="{WIDTH - RIGHT}" y="{floor + 22}" text-anchor="end">trial {last}</text>' if last else "")
        + f'<polyline points="{" ".join(line)}" fill="none" stroke="#f2a541" stroke-width="2"/>{"".join(dots)}'
    )
    return page(config, trials, "history", picture)


def parallel_coordinates_page(config: SweepConfig, trials: Sequence[Trial]) -> str:
    """One line for each trial through its hyperparameters to its value; the best are the darkest, and lie on top."""
    shown = ranked(trials, config.objective.direction)
    if not shown:
        return page(config, trials, "parallel coordinates", "")
    names = list(config.search_space)
    values = [trial.value for trial in shown if trial.value is not None]
    scale = Values.of(values, config.objective.direction)
    apart = max((WIDTH - LEFT - RIGHT) / len(names), BETWEEN)
    axes = "".join(axis(place, apart, name, ends_of(config.search_space[name])) for place, name in enumerate(names))
    axes += axis(len(names), apart, config.objective.metric, scale.marks)
    lines = []
    for rank, (trial, value) in reversed(list(enumerate(zip(shown, values, strict=True)))):
        shares = [*(share_of_axis(config.search_space[name], trial.params[name]) for name in names), scale.share(value)]
        points = " ".join(f"{across(place, apart):.1f},{height_of(at):.1f}" for place, at in enumerate(shares))
        color = blend(rank / max(len(shown) - 1, 1))
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2">'
            f"<title>{words_of(trial)}</title></polyline>"
        )
    return page(
        config, trials, "parallel coordinates", "".join(lines) + axes, width=round(across(len(names), apart)) + RIGHT
    )


def page(config: SweepConfig, trials: Sequence[Trial], kind: str, picture: str, width: int = WIDTH) -> str:
    best = next(iter(ranked(trials, config.objective.direction)), None)
    count = counted(len(trials), "trial")
    told = f"{count} by strategy {config.strategy}, to {config.objective.direction} {config.objective.metric}."
    words = f"{escape(told)} " + (f"Best: {words_of(best)}." if best else "No trial has a value yet.")
    title = escape(f"{config.experiment}: {kind}")
    return PAGE.format(title=title, words=words, width=width, height=HEIGHT, picture=picture)


def words_of(trial: Trial) -> str:
    params = ", ".join(f"{name} {shown(value)}" for name, value in trial.params.items())
    return escape(f"trial {trial.number} ({trial.status}): {shown(trial.value)} with {params}")


def shown(value: Value) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "null"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def ends_of(dimension: Dimension) -> list[tuple[float, str]]:
    """What is written beside an axis, and where."""
    if isinstance(dimension, Choice):
        every = -(-len(dimension.values) // MOST_MARKS)
        return [(share_of_axis(dimension, value), shown(value)) for value in dimension.values[::every]]
    if isinstance(dimension, LogUniform) and (powers := powers_of_ten(dimension)):
        return powers
    return [(tick / (TICKS - 1), shown(number_in(dimension.at(tick / (TICKS - 1))))) for tick in range(TICKS)]


def powers_of_ten(dimension: LogUniform) -> list[tuple[float, str]]:
    """Those on the axis, or every second, or third; and an end that is none where there is room for its text. Nothing where
    there is no power on it.
    """
    low, high = math.log10(dimension.min), math.log10(dimension.max)
    powers = range(math.ceil(low - ROUNDED), math.floor(high + ROUNDED) + 1)
    if not powers:
        return []
    every = -(-len(powers) // MOST_POWERS)
    marks = [(share_of(power, low, high), shown(10.0**power)) for power in powers[::every]]
    ends = ((0.0, shown(dimension.min)), (1.0, shown(dimension.max)))
    return sorted([*marks, *(end for end in ends if all(abs(end[0] - at) > ROOM for at, _ in marks))])


def axis(place: int, apart: float, name: str, marks: Sequence[tuple[float, str]]) -> str:
    """Its texts are cut where the next axis is."""
    x, room = across(place, apart), int(apart / LETTER) - 1
    texts = "".join(f'<text x="{x + 6:.1f}" y="{height_of(at) + 4:.1f}">{cut(text, room)}</text>' for at, text in marks)
    return (
        f'<path d="M{x:.1f},{TOP} V{HEIGHT - BOTTOM}" stroke="{AXIS}"/>'
        f'<text x="{x:.1f}" y="{TOP - 24}" text-anchor="middle" font-weight="600">{cut(name, room)}</text>{texts}'
    )


def cut(text: str, room: int) -> str:
    return escape(text if len(text) <= room else f"{text[: room - 1]}…")


def across(place: int, apart: float) -> float:
    return LEFT + apart * place


def height_of(at: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * at


def blend(rank: float) -> str:
    """From the colour of the best, 0, to that of the worst, 1."""
    return "rgb({:.0f},{:.0f},{:.0f})".format(*(good + (bad - good) * rank for good, bad in zip(GOOD, BAD, strict=True)))
