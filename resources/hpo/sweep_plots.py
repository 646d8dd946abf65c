"""Plot a sweep as self-contained pages: its history, and its hyperparameters in parallel coordinates.

Pure functions.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import quantiles

from recipes.contracts.quantities import pluralize
from resources.hpo.search_space import Choice, Dimension, LogUniform, Value, axis_share, range_share, to_float
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import Trial, rank_trials

WIDTH, HEIGHT = 960, 420
MIN_AXIS_GAP = 150
"""Minimum distance in pixels between two axes: a name is wider than a line."""
LETTER_WIDTH = 7
MAX_MARKS = 20
"""Maximum number of labels on an axis: for a longer choice, only every second or third value has one."""
LEFT, RIGHT, TOP, BOTTOM = 70, 90, 60, 40
GOOD, BAD, AXIS = (79, 67, 221), (222, 224, 232), "#c9ccd6"
TICKS = 5
MAX_POWERS = 11
"""Maximum number of powers of ten on an axis."""
LOG_TOLERANCE = 1e-9
"""Maximum distance of the logarithm of a power of ten from an integer."""
LABEL_SHARE = 0.06
"""Share of an axis that a label occupies."""
OUTLIER_FACTOR = 3.0
"""A value is an outlier if its distance from the worse quartile is more than this times the quartiles' (Tukey 1977)."""
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
class ValueAxis:
    """The axis of the objective. Outliers are drawn at its end.

    Otherwise one diverged trial would compress all others into one line.
    """

    low: float
    high: float
    low_label: str
    high_label: str

    @classmethod
    def from_values(cls, values: Sequence[float], direction: str) -> "ValueAxis":
        ordered = sorted(values)
        first, _, third = quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else (ordered[0],) * 3
        reach = OUTLIER_FACTOR * (third - first)
        if direction == "minimize":
            high = ordered[bisect_right(ordered, third + reach) - 1] if reach else ordered[-1]
            return cls(ordered[0], high, f"{ordered[0]:.5g}", f"{'≥ ' if high < ordered[-1] else ''}{high:.5g}")
        low = ordered[bisect_left(ordered, first - reach)] if reach else ordered[0]
        return cls(low, ordered[-1], f"{'≤ ' if low > ordered[0] else ''}{low:.5g}", f"{ordered[-1]:.5g}")

    @property
    def marks(self) -> list[tuple[float, str]]:
        """The labels of the axis, with their positions."""
        return (
            [(0.0, self.low_label), (1.0, self.high_label)]
            if self.high > self.low
            else [(self.share(self.low), self.low_label)]
        )

    def share(self, value: float) -> float:
        return min(max(range_share(value, self.low, self.high), 0.0), 1.0)


def history_page(config: SweepConfig, trials: Sequence[Trial]) -> str:
    """Plot the value of each trial, with a line for the best so far."""
    shown = sorted(rank_trials(trials, config.objective.direction), key=lambda trial: trial.number)
    if not shown:
        return render_page(config, trials, "history", "")
    values = [trial.value for trial in shown if trial.value is not None]
    scale = ValueAxis.from_values(values, config.objective.direction)
    last = max(trial.number for trial in trials)

    def place(number: int, value: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * number / max(last, 1), value_y(scale.share(value))

    better = min if config.objective.direction == "minimize" else max
    best, line, dots = values[0], [], []
    for trial, value in zip(shown, values, strict=True):
        best = better(best, value)
        line.append("{:.1f},{:.1f}".format(*place(trial.number, best)))
        x, y = place(trial.number, value)
        hollow = "" if trial.status == "completed" else ' fill-opacity="0.35"'
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" '
            f'fill="rgb{GOOD}"{hollow}><title>{describe_trial(trial)}</title></circle>'
        )
    floor = HEIGHT - BOTTOM
    picture = (
        f'<path d="M{LEFT},{TOP} V{floor} H{WIDTH - RIGHT}" stroke="{AXIS}" fill="none"/>'
        + "".join(
            f'<text x="{LEFT - 8}" y="{value_y(at) + 4:.1f}" text-anchor="end">{text}</text>'
            for at, text in reversed(scale.marks)
        )
        + f'<text x="{LEFT}" y="{floor + 22}">trial 0</text>'
        + (f'<text x="{WIDTH - RIGHT}" y="{floor + 22}" text-anchor="end">trial {last}</text>' if last else "")
        + f'<polyline points="{" ".join(line)}" fill="none" stroke="#f2a541" stroke-width="2"/>{"".join(dots)}'
    )
    return render_page(config, trials, "history", picture)


def parallel_coordinates_page(config: SweepConfig, trials: Sequence[Trial]) -> str:
    """Plot each trial as a line through its hyperparameters to its value.

    The best are darkest and on top.
    """
    shown = rank_trials(trials, config.objective.direction)
    if not shown:
        return render_page(config, trials, "parallel coordinates", "")
    names = list(config.search_space)
    values = [trial.value for trial in shown if trial.value is not None]
    scale = ValueAxis.from_values(values, config.objective.direction)
    apart = max((WIDTH - LEFT - RIGHT) / len(names), MIN_AXIS_GAP)
    axes = "".join(draw_axis(place, apart, name, axis_marks(config.search_space[name])) for place, name in enumerate(names))
    axes += draw_axis(len(names), apart, config.objective.metric, scale.marks)
    lines = []
    for rank, (trial, value) in reversed(list(enumerate(zip(shown, values, strict=True)))):
        shares = [*(axis_share(config.search_space[name], trial.params[name]) for name in names), scale.share(value)]
        points = " ".join(f"{axis_x(place, apart):.1f},{value_y(at):.1f}" for place, at in enumerate(shares))
        color = blend_color(rank / max(len(shown) - 1, 1))
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2">'
            f"<title>{describe_trial(trial)}</title></polyline>"
        )
    return render_page(
        config, trials, "parallel coordinates", "".join(lines) + axes, width=round(axis_x(len(names), apart)) + RIGHT
    )


def render_page(config: SweepConfig, trials: Sequence[Trial], kind: str, picture: str, width: int = WIDTH) -> str:
    best = next(iter(rank_trials(trials, config.objective.direction)), None)
    count = pluralize(len(trials), "trial")
    summary = f"{count} by strategy {config.strategy}, to {config.objective.direction} {config.objective.metric}."
    words = f"{escape(summary)} " + (f"Best: {describe_trial(best)}." if best else "No trial has a value yet.")
    title = escape(f"{config.experiment}: {kind}")
    return PAGE.format(title=title, words=words, width=width, height=HEIGHT, picture=picture)


def describe_trial(trial: Trial) -> str:
    params = ", ".join(f"{name} {format_value(value)}" for name, value in trial.params.items())
    return escape(f"trial {trial.number} ({trial.status}): {format_value(trial.value)} with {params}")


def format_value(value: Value) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if value is None:
        return "null"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def axis_marks(dimension: Dimension) -> list[tuple[float, str]]:
    """Return the labels of an axis, with their positions."""
    if isinstance(dimension, Choice):
        every = -(-len(dimension.values) // MAX_MARKS)
        return [(axis_share(dimension, value), format_value(value)) for value in dimension.values[::every]]
    if isinstance(dimension, LogUniform) and (powers := powers_of_ten(dimension)):
        return powers
    return [(tick / (TICKS - 1), format_value(to_float(dimension.at(tick / (TICKS - 1))))) for tick in range(TICKS)]


def powers_of_ten(dimension: LogUniform) -> list[tuple[float, str]]:
    """Return the powers of ten on the axis, or every second or third of them.

    Empty if there is none. An end of the axis that is no power is added if there is room for its label.
    """
    low, high = math.log10(dimension.min), math.log10(dimension.max)
    powers = range(math.ceil(low - LOG_TOLERANCE), math.floor(high + LOG_TOLERANCE) + 1)
    if not powers:
        return []
    every = -(-len(powers) // MAX_POWERS)
    marks = [(range_share(power, low, high), format_value(10.0**power)) for power in powers[::every]]
    ends = ((0.0, format_value(dimension.min)), (1.0, format_value(dimension.max)))
    return sorted([*marks, *(end for end in ends if all(abs(end[0] - at) > LABEL_SHARE for at, _ in marks))])


def draw_axis(place: int, apart: float, name: str, marks: Sequence[tuple[float, str]]) -> str:
    """Draw an axis; its labels are cut off at the next axis."""
    x, room = axis_x(place, apart), int(apart / LETTER_WIDTH) - 1
    texts = "".join(f'<text x="{x + 6:.1f}" y="{value_y(at) + 4:.1f}">{truncate(text, room)}</text>' for at, text in marks)
    return (
        f'<path d="M{x:.1f},{TOP} V{HEIGHT - BOTTOM}" stroke="{AXIS}"/>'
        f'<text x="{x:.1f}" y="{TOP - 24}" text-anchor="middle" font-weight="600">{truncate(name, room)}</text>{texts}'
    )


def truncate(text: str, room: int) -> str:
    return escape(text if len(text) <= room else f"{text[: room - 1]}…")


def axis_x(place: int, apart: float) -> float:
    return LEFT + apart * place


def value_y(at: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * at


def blend_color(rank: float) -> str:
    """Interpolate between the color of the best (0) and of the worst (1)."""
    return "rgb({:.0f},{:.0f},{:.0f})".format(*(good + (bad - good) * rank for good, bad in zip(GOOD, BAD, strict=True)))
