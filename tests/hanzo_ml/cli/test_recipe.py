"""`hanzo-ml recipe` and `hanzo-ml job estimate`, as a user types them."""

import json
from pathlib import Path

import pytest

from recipes.contracts.recipe import Recipe
from tests.support.cli.command_line import create, refusal, run
from tests.support.server_process import ServerProcess

NOWHERE = "http://127.0.0.1:9"
"""Recipes are read where the command runs: no server is needed."""


def test_list_has_every_recipe_with_its_memory() -> None:
    rows = json.loads(run(NOWHERE, "recipe", "list", "--json").stdout)
    assert [row["name"] for row in rows] == Recipe.names()
    assert all(row["memory_needed"] < row["memory_available"] for row in rows)
    shown = run(NOWHERE, "recipe", "list").stdout
    assert all(name in shown for name in Recipe.names())


def test_show_output_loads_as_the_same_recipe(tmp_path: Path) -> None:
    path = tmp_path / "again.yaml"
    path.write_text(run(NOWHERE, "recipe", "show", "zen-72b-qlora").stdout)
    assert Recipe.load(path) == Recipe.named("zen-72b-qlora")
    path.write_text(path.read_text() + "image: me/mine:3f2a9c1\n")
    assert "image: me/mine:3f2a9c1\n" in run(NOWHERE, "recipe", "show", str(path)).stdout
    path.write_text(path.read_text().replace("3f2a9c1", "latest"))
    assert "may change at any time" in refusal(run(NOWHERE, "recipe", "show", str(path)))
    path.write_text(path.read_text().replace("image: me/mine:latest\n", ""))
    assert json.loads(run(NOWHERE, "recipe", "show", str(path), "--json").stdout)["double_quant"] is True


@pytest.mark.slow
def test_check_tests_a_custom_recipe(tmp_path: Path) -> None:
    text = run(NOWHERE, "recipe", "show", "smollm2-135m-lora").stdout
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("name: smollm2-135m-lora", "name: mine") + "image: me/mine:3f2a9c1\n")
    done = run(NOWHERE, "recipe", "check", str(path))
    assert done.returncode == 0, done.stderr
    assert "134,515,008, trained 4,884,480 in 210 modules" in done.stdout
    assert "image        me/mine:3f2a9c1\n" in done.stdout
    path.write_text(text.replace("gpus: 0", "gpuz: 0"))
    line = path.read_text().splitlines().index("  gpuz: 0") + 1
    assert f"{path}, line {line}: unknown key 'hardware.gpuz'" in refusal(run(NOWHERE, "recipe", "check", str(path)))


def test_unknown_recipe_is_refused_with_known_recipes() -> None:
    assert "zen-7b-lora" in refusal(run(NOWHERE, "recipe", "show", "zen-8b"))


@pytest.mark.slow
def test_estimate_is_printed_in_words(server: ServerProcess, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"instruction": "Who?", "answer": "She."}\n')
    assert create(lambda *arguments: run(server.url, *arguments), data).returncode == 0
    config = tmp_path / "job.yaml"
    config.write_text("name: mine\ndataset: d\nrecipe: zen-7b-lora\n")
    shown = run(server.url, "job", "estimate", "--config", str(config)).stdout
    assert "10,000 of 32,768 tokens: 327,680,000 tokens" in shown
    assert "tokens per trained parameter (161,480,704); 20 per parameter are best from nothing (Hoff" in shown
    assert "4 hours, $20 (the recipe's own figures)" in shown
    assert "of 39.4 GiB on each nvidia-a100-40gb" in shown
    assert "\ndisk      1.8 GiB a checkpoint; the disk must hold two of them, the store up to 5\n" in shown
    refused = refusal(run(server.url, "job", "estimate", "--config", str(config), "--set", "batch_size=64"))
    assert "which is the same effective batch" in refused
