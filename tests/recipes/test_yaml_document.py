"""YAML whose aliases stand for more than a machine can hold, and YAML whose aliases are of use."""

from pathlib import Path

import pytest
import yaml

from recipes.recipe import Recipe
from recipes.schema import BadConfiguration
from recipes.yaml_document import LONGEST, yaml_document

LISTS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
"""Ten lines for ten thousand million letters."""
MERGES = "a0: &a0 {k: v}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10))
KEYS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"? &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n: v\n" for n in range(1, 10)
)
BOMBS = {
    "lists": LISTS,
    "merges": MERGES,
    "keys": KEYS,
    "a long text": f"a: &a {'x' * 10_000}\nb: [{', '.join(['*a'] * 1000)}]\n",
    "itself": "a: &a [*a]\n",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_few_lines_that_stand_for_millions_are_refused(bomb: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"aliases .* write out what you need"):
        yaml_document(BOMBS[bomb])


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_recipe_that_is_one_is_refused_by_its_file(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(BOMBS[bomb])
    with pytest.raises(BadConfiguration, match=r"mine\.yaml is not valid YAML: with what its aliases") as caught:
        Recipe.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: 1\nb: [2026-01-01, .inf, null, 'x']\n",
        "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n",
        f"a: {'x' * (LONGEST - 100)}\n",
    ],
    ids=["empty", "plain", "aliases", "long"],
)
def test_anything_else_is_what_yaml_says(text: str) -> None:
    assert yaml_document(text) == yaml.safe_load(text)
