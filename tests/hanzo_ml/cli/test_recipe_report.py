"""Output of `hanzo-ml recipe`: memory and hardware, the start command, and problems."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import recipes.contracts.recipe
from hanzo_ml.cli import recipe_report
from hanzo_ml.cli.connection import Refused
from recipes.contracts.recipe import RECIPES_FOLDER, Recipe
from recipes.planning.hardware_fit import check_fit, describe_hardware, format_bytes
from recipes.planning.memory_budget import estimate_memory
from recipes.planning.recipe_checks import known_shape

ZEN = [name for name in Recipe.names() if name.startswith("zen-")]
BUILT = 72_706_203_648
TRAINED = 262_144_000


def played(**changes: Any) -> dict[str, Any]:
    """Return the facts that the libraries report on zen-72b-lora, with changes."""
    parameters = {"parameters": BUILT, "parameters_expected": BUILT, "trainable": TRAINED, "trainable_expected": TRAINED}
    return {**parameters, "adapted_modules": 320, "kept": None, "command": [], "sharding": {}, **changes}


def test_unreadable_recipes_do_not_hide_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One misspelled key in a user's recipe turned the list into sixty lines of Python."""
    shutil.copy(RECIPES_FOLDER / "zen-7b-lora.yaml", tmp_path)
    for name in ("mine", "yours"):
        text = (RECIPES_FOLDER / "zen-7b-lora.yaml").read_text()
        (tmp_path / f"{name}.yaml").write_text(text.replace("batch_size", "batch_sise"))
    monkeypatch.setattr(recipes.contracts.recipe, "RECIPES_FOLDER", tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(Refused) as refused:
        recipe_report.list_recipes(as_json=False)
    lines = str(refused.value).splitlines()
    assert all(
        f"{name}.yaml, line 15: unknown key 'batch_sise'" in line
        for name, line in zip(("mine", "yours"), lines, strict=True)
    )
    assert capsys.readouterr().out.splitlines()[1].startswith("zen-7b-lora")


def test_each_zen_recipe_is_listed_with_its_memory_and_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    recipe_report.list_recipes(as_json=False)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert len(ZEN) == 5
    for recipe in map(Recipe.named, ZEN):
        shape = known_shape(recipe)
        assert shape is not None
        found = check_fit(recipe, shape, host_memory=0)
        assert found.available is not None and found.fits
        memory = f"{format_bytes(estimate_memory(recipe, shape).needed)} of {format_bytes(found.available)}"
        figures = (describe_hardware(recipe), memory, f"{recipe.estimated_time}, {recipe.estimated_cost}")
        assert "  ".join(rows[recipe.name].split()) == "  ".join(
            f"{recipe.name} {recipe.method} sft {recipe.base_model.uri} {' '.join(figures)} not yet".split()
        )


@pytest.mark.slow
def test_recipe_check_prints_memory_parts_and_start_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the libraries' own model of 72 billion parameters, without its weights."""
    recipe_report.check_recipe("zen-72b-lora", as_json=False)
    said = capsys.readouterr().out.splitlines()
    assert f"parameters   {BUILT:,}, trained {TRAINED:,} in 320 modules (0.36%)" in said
    recipe = Recipe.named("zen-72b-lora")
    shape = known_shape(recipe)
    assert shape is not None
    for part, size in vars(estimate_memory(recipe, shape)).items():
        assert any(line.split() == [part, *format_bytes(size).split()] for line in said), part
    assert "start        torchrun --nnodes=1 --nproc-per-node=4 -m recipes.train job.json" in said
    assert 'sharding     {"distributed_config": {"fsdp_size": 4, "fsdp_mixed_precision": false}}' in said
    assert "seed         12 hours, $200 (the recipe's own figures)" in said


def test_recipe_check_says_the_command_runs_on_each_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run on one node, torchrun would wait for three others that were never started."""
    command = ["torchrun", "--nnodes=4", "--nproc-per-node=8", "-m", "recipes.train", "job.json"]
    monkeypatch.setattr(recipe_report, "run_dry_run", lambda name: played(command=command))
    recipe_report.check_recipe("zen-72b-full", as_json=False)
    said = capsys.readouterr().out.splitlines()
    disk = next(line for line in said if line.startswith("disk"))
    assert disk.startswith("disk         812.6 GiB a checkpoint; each node's disk must hold two parts of 203.1 GiB (")
    (start,) = (line for line in said if line.startswith("start"))
    assert start == f"start        {' '.join(command)} (on each of 4 nodes; rank and rendezvous are added at the start)"


@pytest.mark.parametrize(
    ("estimate", "shown"),
    [("", None), ('estimated_time: "1 hour"\n', "1 hour"), ('estimated_cost: "$9"\n', "$9")],
)
def test_recipe_check_omits_absent_estimates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, estimate: str, shown: str | None
) -> None:
    monkeypatch.setattr(recipe_report, "run_dry_run", lambda name: played())
    text = (RECIPES_FOLDER / "zen-72b-lora.yaml").read_text()
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("".join(line for line in text.splitlines(keepends=True) if "estimated" not in line) + estimate)
    recipe_report.check_recipe(str(recipe), as_json=False)
    seeds = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed")]
    assert seeds == ([f"seed         {shown} (the recipe's own figures)"] if shown else [])


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        (
            "objective: sft",
            "objective: sft\nlora_dropout: 0.1\nsequence_length: 9000",
            "sequence_length is 9000, and base model",
        ),
        ("[q_proj, k_proj", "[q_prj, k_proj", "there is no 'q_prj' in this model: use some of q_proj"),
        (
            "objective: sft",
            "objective: sft\ndistributed: {strategy: pipeline, gpus_per_node: 31}",
            "strategy pipeline divides the base model's 30 layers: use at most 30 processes",
        ),
    ],
)
def test_recipe_check_refuses_what_no_job_would_be_admitted_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, instead: str, words: str
) -> None:
    """It was only a note below a successful check.

    A wrong target was reported without file and line.
    """
    monkeypatch.setattr(recipe_report, "run_dry_run", lambda name: played())
    recipe = tmp_path / "mine.yaml"
    text = (RECIPES_FOLDER / "smollm2-135m-lora.yaml").read_text()
    if "sequence_length" in instead:
        text = text.replace("sequence_length: 512\n", "")
    recipe.write_text(text.replace(line, instead))
    with pytest.raises(Refused, match=words) as caught:
        recipe_report.check_recipe(str(recipe), as_json=True)
    assert str(caught.value).startswith(str(recipe))
    if "pipeline" not in instead:
        key = "sequence_length" if "sequence_length" in instead else "lora_target_modules"
        (number,) = (n for n, each in enumerate(recipe.read_text().splitlines(), 1) if each.startswith(key))
        assert f"{recipe}, line {number}: " in str(caught.value)


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (played(parameters=BUILT + 1), "parameters are 72,706,203,649, expected 72,706,203,648"),
        (played(trainable=1), "trainable are 1, expected 262,144,000"),
    ],
)
def test_recipe_check_refuses_a_dry_run_that_differs_from_the_estimate(
    monkeypatch: pytest.MonkeyPatch, built: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(recipe_report, "run_dry_run", lambda name: built)
    with pytest.raises(Refused, match=f"^recipe 'zen-72b-lora' cannot be trained as it is: {words}$"):
        recipe_report.check_recipe("zen-72b-lora", as_json=True)


def test_recipe_check_refuses_a_recipe_that_does_not_fit_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipe_report, "run_dry_run", lambda name: played())
    recipe = tmp_path / "mine.yaml"
    text = (RECIPES_FOLDER / "zen-72b-lora.yaml").read_text()
    recipe.write_text(text.replace("batch_size: 1\n", "batch_size: 16\n"))
    words = r"it needs [0-9.]+ GiB of the 79\.2 GiB on each nvidia-a100-80gb"
    with pytest.raises(Refused, match=f"^recipe 'zen-72b-lora' cannot be trained as it is: {words}$"):
        recipe_report.check_recipe(str(recipe), as_json=True)


def test_recipe_check_advises_more_memory_when_the_allowance_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It reported 1.9 GiB of 1.0 GiB as sufficient."""
    monkeypatch.setattr(recipe_report, "run_dry_run", lambda name: played())
    recipe = tmp_path / "mine.yaml"
    for memory, advised in (("1Gi", True), ("4Gi", False)):
        recipe.write_text(
            (RECIPES_FOLDER / "smollm2-135m-lora.yaml").read_text().replace("memory: 4Gi", f"memory: {memory}")
        )
        recipe_report.check_recipe(str(recipe), as_json=False)
        assert ("raise hardware.memory" in capsys.readouterr().out) is advised


def test_memory_part_is_separated_from_its_name_at_any_size() -> None:
    """A recipe that does not fit was reported as `activations200.7 GiB`."""
    recipe = Recipe.named("zen-7b-lora").changed({"sequence_length": 1_000_000})
    shape = known_shape(recipe)
    assert shape is not None
    said = recipe_report.report_lines(recipe, check_fit(recipe, shape, host_memory=0), 0, played())
    (activations,) = (line.split() for line in said if line.startswith("  activations"))
    assert activations[0] == "activations" and float(activations[1]) > 1000


def test_small_memory_part_is_printed_in_mib() -> None:
    """18.6 MiB of trained weights were reported as `adapter 0.0 GiB`."""
    recipe = Recipe.named("smollm2-135m-lora")
    shape = known_shape(recipe)
    assert shape is not None
    said = recipe_report.report_lines(recipe, check_fit(recipe, shape, host_memory=0), 0, played())
    parts = dict(line.split(maxsplit=1) for line in said if line.startswith("  "))
    assert (parts["adapter"], parts["allowance"]) == ("18.6 MiB", "1.0 GiB")
