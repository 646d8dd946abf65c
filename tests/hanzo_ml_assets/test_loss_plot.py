"""The loss curve is a picture that every Markdown reader renders, for any losses."""

import base64
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hanzo_ml_assets.training import HEIGHT, MARGIN, WIDTH, loss_plot

SVG = "{http://www.w3.org/2000/svg}"
HEAD = "![loss by step](data:image/svg+xml;base64,"


def picture(markdown: str) -> ElementTree.Element:
    assert markdown.startswith(HEAD) and markdown.endswith(")") and "\n" not in markdown
    return ElementTree.fromstring(base64.b64decode(markdown.removeprefix(HEAD)[:-1]))


def points(markdown: str) -> list[tuple[float, float]]:
    line = picture(markdown).find(f"{SVG}polyline")
    assert line is not None
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]


def test_curve_is_ordered_by_step_and_falls_with_the_loss() -> None:
    drawn = points(loss_plot({3: 1.0, 1: 4.0, 2: 2.0}))
    assert drawn[0] == (MARGIN, MARGIN)
    assert drawn[-1] == (WIDTH - MARGIN, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) / 4)
    assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
    assert [y for _, y in drawn] == sorted(y for _, y in drawn)


def test_plot_labels_first_and_last_step_axis_top_and_last_loss() -> None:
    words = [text.text for text in picture(loss_plot({20: 2.5, 100: 0.125})).findall(f"{SVG}text")]
    assert words == ["2.50", "0", "step 20", "step 100, loss 0.125"]


@pytest.mark.parametrize("losses", [{}, {1: 2.0}, {1: math.nan, 2: math.inf, 3: 1.0}])
def test_plot_of_fewer_than_two_finite_losses_is_a_message(losses: dict[int, float]) -> None:
    assert loss_plot(losses) == "no curve: fewer than two finite losses"


def test_nonfinite_losses_are_omitted() -> None:
    assert loss_plot({1: 3.0, 2: math.nan, 3: math.inf, 4: 1.0}) == loss_plot({1: 3.0, 4: 1.0})


@given(st.dictionaries(st.integers(0, 10**6), st.floats(0, 1e9), min_size=2, max_size=50))
def test_every_point_lies_inside_the_axes(losses: dict[int, float]) -> None:
    for x, y in points(loss_plot(losses)):
        assert MARGIN <= x <= WIDTH - MARGIN
        assert MARGIN <= y <= HEIGHT - MARGIN


@given(st.dictionaries(st.integers(0, 100), st.floats(allow_nan=True, allow_infinity=True), max_size=10))
def test_any_losses_are_plotted_without_error(losses: dict[int, float]) -> None:
    assert loss_plot(losses)
