"""YAML aliases: exponential expansion is refused, ordinary use works."""

from pathlib import Path

import pytest
import yaml

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.yaml_reader import MAX_CHARACTERS, load_yaml, read_yaml_mapping
from tests.support.recipes.hostile_yaml import BOMBS


@pytest.mark.requirement("X9")
@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_alias_bomb_is_refused(bomb: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"aliases .* shorten it, or remove"):
        load_yaml(BOMBS[bomb])


@pytest.mark.parametrize("bomb", BOMBS)
def test_recipe_with_yaml_alias_bomb_is_refused_naming_its_file(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(BOMBS[bomb])
    with pytest.raises(BadConfiguration, match=r"mine\.yaml is not valid YAML: with its aliases") as caught:
        Recipe.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: 1\nb: [2026-01-01, .inf, null, 'x']\n",
        "[0, -7, +7, 1_000, 0x1f, 0b11, 1.5, .5, 1., -1.5e-3, 1e-4, -.inf, 08, 20m]\n",
        "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n",
        f"a: {'x' * (MAX_CHARACTERS - 100)}\n",
    ],
    ids=["empty", "plain", "numbers", "aliases", "long"],
)
def test_other_yaml_loads_like_safe_load(text: str) -> None:
    assert load_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["1:30", "-1:30", "1:30:00", "12:30:45.5", "010", "00", "-010"])
def test_sexagesimal_value_is_read_as_text(text: str) -> None:
    """Regression: `interval: 1:30` was refused as the number 90, and `max_steps: 1:30` accepted as 90."""
    assert load_yaml(f"a: {text}\nb: [{text}]") == {"a": text, "b": [text]}


def test_sexagesimal_key_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("env: {08:00: morning, 1:30: night}\n")
    assert read_yaml_mapping(path)[1] == {"env": {"08:00": "morning", "1:30": "night"}}
