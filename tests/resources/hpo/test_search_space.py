"""Search spaces: the values they sample and the configurations they refuse."""

import math
import random

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from resources.hpo.search_space import (
    Choice,
    Dimension,
    LogUniform,
    Space,
    Uniform,
    axis_share,
    grid_point,
    grid_size,
    perturb_params,
    sample_params,
)

RATE = LogUniform(type="log_uniform", min=1e-6, max=1e-3, points=4)
RATIO = Uniform(type="uniform", min=0.0, max=0.1, points=3)
RANK = Choice(type="choice", values=(8, 16, 32))
SPACE: Space = {"learning_rate": RATE, "warmup_ratio": RATIO, "lora_rank": RANK}


@pytest.mark.requirement("K3")
def test_grid_has_every_combination_once() -> None:
    points = [tuple(grid_point(SPACE, number).values()) for number in range(grid_size(SPACE))]
    assert len(set(points)) == 4 * 3 * 3
    assert sorted({round(math.log10(float(point[0])), 6) for point in points}) == [-6, -5, -4, -3]
    assert sorted({point[1] for point in points}) == [0.0, 0.05, 0.1]
    assert {point[2] for point in points} == {8, 16, 32}


def test_a_log_uniform_has_as_many_values_in_each_order_of_magnitude() -> None:
    chance = random.Random(1)
    exponents = [math.floor(math.log10(float(sample_params({"x": RATE}, chance)["x"]))) for _ in range(3000)]
    counts = [exponents.count(exponent) for exponent in (-6, -5, -4)]
    assert sum(counts) == 3000 and all(850 < count < 1150 for count in counts)


@pytest.mark.parametrize("top", [1e200, 1.7976931348623157e308])
def test_log_uniform_range_with_an_overflowing_ratio_is_searchable(top: float) -> None:
    wide = LogUniform(type="log_uniform", min=1e-200, max=top)
    shares = [0.0, 0.25, 0.5, 1.0]
    values = [wide.at(share) for share in shares]
    assert (values[0], values[-1]) == (wide.min, wide.max)
    assert [axis_share(wide, value) for value in values] == pytest.approx(shares)


def test_perturbed_params_stay_near_and_within_their_range() -> None:
    chance = random.Random(1)
    for _ in range(200):
        params = sample_params(SPACE, chance)
        near = perturb_params(SPACE, params, chance)
        assert RATE.min <= float(near["learning_rate"]) <= RATE.max
        assert 0.79 < float(near["learning_rate"]) / float(params["learning_rate"]) < 1.21
        assert abs(RANK.values.index(near["lora_rank"]) - RANK.values.index(params["lora_rank"])) <= 1


def test_numbers_that_yaml_reads_as_strings_are_converted() -> None:
    document = yaml.safe_load(
        "{rate: {type: choice, values: [1e-5, 1e+1, a1e5, 2]}, other: {type: uniform, min: 1e-6, max: 1e2}}"
    )
    space = TypeAdapter[Space](Space).validate_python(document)
    assert [space["rate"].at(share) for share in (0.0, 0.3, 0.6, 0.9)] == [1e-5, 10.0, "a1e5", 2]
    assert [space["other"].at(share) for share in (0.0, 1.0)] == [1e-6, 100.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "uniform", "min": 1, "max": 1}, "min must be less than max"),
        ({"type": "log_uniform", "min": 0, "max": 1}, "must be more than 0"),
        ({"type": "log_uniform", "min": 1e-3, "max": "inf"}, "finite"),
        ({"type": "uniform", "min": False, "max": 0.1}, "must be a number: YAML reads yes, on and true as false"),
        ({"type": "choice", "values": []}, "at least 1"),
        ({"type": "choice", "values": [{"q_proj": 8}]}, "null, or a list of numbers"),
        ({"type": "choice", "values": [[["q_proj"]]]}, "null, or a list of numbers"),
        ({"type": "normal", "mean": 0}, "tag 'normal'"),
    ],
)
def test_invalid_dimension_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TypeAdapter[Dimension](Dimension).validate_python(given)
