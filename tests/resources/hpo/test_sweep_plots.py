"""Sweep plots, tested by drawn coordinates: better is higher, history shows the best so far."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest

from resources.hpo.search_space import LogUniform, Params, axis_share
from resources.hpo.sweep_plots import axis_marks, history_page, parallel_coordinates_page
from resources.hpo.trial import Trial
from tests.resources.hpo.sweep_files import sweep

SPACE = {
    "learning_rate": {"type": "log_uniform", "min": 1e-5, "max": 1e-1},
    "lora_rank": {"type": "choice", "values": [8, 16, 32]},
}
TOP, MIDDLE, FLOOR = 60.0, 220.0, 380.0
POINTS: Sequence[Params] = (
    {"learning_rate": 1e-5, "lora_rank": 32},
    {"learning_rate": 1e-1, "lora_rank": 8},
    {"learning_rate": 1e-3, "lora_rank": 16},
)
VALUES = (3.0, 1.0, 2.0)
TRIALS = [
    Trial(number, "", params, "completed", 1, value=value, step=1)
    for number, (params, value) in enumerate(zip(POINTS, VALUES, strict=True))
]


def lines_of(page: str) -> list[list[float]]:
    """Return the heights of each line, from left to right."""
    return [
        [float(pair.split(",")[1]) for pair in line.split(" ")] for line in re.findall(r'<polyline points="([^"]+)"', page)
    ]


@pytest.mark.parametrize(("direction", "best"), [("minimize", [TOP, FLOOR, FLOOR]), ("maximize", [TOP, TOP, TOP])])
def test_history_plots_a_dot_per_trial_and_a_line_of_the_best_so_far(direction: str, best: list[float]) -> None:
    page = history_page(sweep(search_space=SPACE, objective={"metric": "eval/loss", "direction": direction}), TRIALS)
    assert lines_of(page) == [best]
    assert [float(height) for height in re.findall(r'<circle cx="[^"]+" cy="([^"]+)"', page)] == [TOP, FLOOR, MIDDLE]


def test_parallel_coordinates_cross_every_hyperparameter_with_the_best_trial_on_top() -> None:
    page = parallel_coordinates_page(sweep(search_space=SPACE), TRIALS)
    assert lines_of(page) == [[FLOOR, TOP, TOP], [MIDDLE, MIDDLE, MIDDLE], [TOP, FLOOR, FLOOR]]  # the last is drawn on top
    assert re.findall(r'font-weight="600">([^<]+)<', page) == ["learning_rate", "lora_rank", "eval/loss"]


@pytest.mark.parametrize(
    ("direction", "values", "ends"),
    [
        ("minimize", [1.0, 1.1, 1.2, 1.3, 1.4, 1e30], ["≥ 1.4", "1"]),
        ("maximize", [1.0, 1.1, 1.2, 1.3, -80.0, 1.4], ["1.4", "≤ 1"]),
        ("minimize", [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], ["1.5", "1"]),
        ("maximize", [80.0, 1.1, 1.2, 1.3, 1.4, 1.5], ["80", "1.1"]),  # a far better value is the goal and not clipped
        ("minimize", [1.0] * 5 + [2.0], ["2", "1"]),
    ],
)
def test_a_trial_that_is_far_worse_does_not_flatten_the_others(direction: str, values: list[float], ends: list[str]) -> None:
    """Regression: one diverged trial of fifty flattened all others into a line at the bottom."""
    config = sweep(search_space=SPACE, objective={"metric": "eval/loss", "direction": direction})
    trials = [Trial(number, "", POINTS[0], "completed", 1, value=value, step=1) for number, value in enumerate(values)]
    pages = history_page(config, trials), parallel_coordinates_page(config, trials)
    for page, expected in zip(pages, (ends, ends[::-1]), strict=True):
        assert [text for text in re.findall(r"<text [^>]*>([^<]+)</text>", page) if text in ends] == expected
        assert page.count("<title>trial ") == len(values)
    dots = [float(height) for height in re.findall(r'<circle cx="[^"]+" cy="([^"]+)"', pages[0])]
    assert {TOP, FLOOR} <= set(dots) and all(TOP <= dot <= FLOOR for dot in dots)
    assert len(set(dots)) == len(set(values)) - any("≥" in end or "≤" in end for end in ends)


def test_texts_of_many_hyperparameters_do_not_overlap() -> None:
    """Regression: fourteen names overlapped horizontally, and forty values vertically."""
    long = "a-base-model-whose-name-goes-on-and-on"
    space = {f"hyperparameter_number_{number}": {"type": "choice", "values": [1, long]} for number in range(14)}
    space["layers"] = {"type": "choice", "values": list(range(40))}
    params: Params = dict.fromkeys(space, 1)
    page = parallel_coordinates_page(sweep(search_space=space), [Trial(0, "", params, "completed", 1, value=1.0, step=1)])
    width = float(re.findall(r'width="(\d+)"', page)[0])
    texts = re.findall(r'<text x="([^"]+)" y="([^"]+)"(?: text-anchor="middle")?(?: font-weight="600")?>([^<]+)<', page)
    places = sorted((float(y), float(x), len(text) * 7.0) for x, y, text in texts)
    assert len(places) > 40
    for (y, x, wide), (below, right, _) in pairwise(places):
        assert y != below or x + wide <= right, (y, x, right)
    layers = next(x for x, _, text in texts if text == "0")
    heights = sorted(float(y) for x, y, _ in texts if x == layers)
    assert len(heights) == 20 and all(above - below >= 14 for below, above in pairwise(heights))
    assert max(x for _, x, _ in places) <= width - 80 and "<title>trial 0 (completed): 1 with " in page


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (1e-5, 1e-1, ["1e-05", "0.0001", "0.001", "0.01", "0.1"]),
        (2e-5, 5e-3, ["2e-05", "0.0001", "0.001", "0.005"]),
        (9e-6, 1.1e-3, ["1e-05", "0.0001", "0.001"]),  # no room for an end next to a power of ten
        (1e-6, 1e2, ["1e-06", "1e-05", "0.0001", "0.001", "0.01", "0.1", "1", "10", "100"]),
        (1e-20, 1.0, ["1e-20", "1e-18", "1e-16", "1e-14", "1e-12", "1e-10", "1e-08", "1e-06", "0.0001", "0.01", "1"]),
        (2e-4, 3e-3, ["0.0002", "0.001", "0.003"]),
        (2e-4, 8e-4, ["0.0002", "0.00028284", "0.0004", "0.00056569", "0.0008"]),  # it contains no power of ten
    ],
)
def test_logarithmic_axis_is_marked_at_powers_of_ten(low: float, high: float, marks: list[str]) -> None:
    """Regression: marks at equal ratios were unreadable learning rates such as 5.6234e-06."""
    found = axis_marks(LogUniform(type="log_uniform", min=low, max=high))
    assert [text for _, text in found] == marks
    axis = LogUniform(type="log_uniform", min=low, max=high)
    assert [at for at, _ in found] == pytest.approx([axis_share(axis, float(text)) for text in marks], abs=1e-4)


def test_axis_of_a_constant_value_has_one_label() -> None:
    same = [Trial(number, "", POINTS[number], "completed", 1, value=7.0, step=1) for number in range(2)]
    for page in (history_page(sweep(search_space=SPACE), same), parallel_coordinates_page(sweep(search_space=SPACE), same)):
        assert re.findall(r'y="([^"]+)"[^>]*>7<', page) == [str(MIDDLE + 4)]


def test_single_trial_is_counted_in_the_singular() -> None:
    assert "<p>1 trial by strategy" in history_page(sweep(search_space=SPACE), TRIALS[:1])
