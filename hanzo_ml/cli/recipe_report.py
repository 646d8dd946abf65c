"""Show recipes, their memory budgets, and the result of a dry run."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.output import print_json, print_table
from recipes.contracts.job import BadConfiguration
from recipes.contracts.quantities import pluralize
from recipes.contracts.recipe import Recipe
from recipes.contracts.yaml_reader import find_line, find_named_key, load_yaml
from recipes.extras import TRAIN, lacking
from recipes.planning.hardware_fit import (
    HardwareFit,
    check_fit,
    checkpoint_bytes,
    describe_disk_usage,
    describe_hardware,
    format_bytes,
)
from recipes.planning.recipe_checks import (
    find_contradiction,
    known_shape,
    resolve_shape,
    sequence_too_long_reason,
    unsupported_reason,
)


def list_recipes(as_json: bool) -> None:
    """Print all readable recipes, then raise Refused if others cannot be read."""
    rows, broken = [], []
    for name in Recipe.names():
        try:
            rows.append(summarize_recipe(Recipe.named(name)))
        except BadConfiguration as problem:
            broken.append(str(problem))
    print_json(rows) if as_json else print_recipes(rows)
    if broken:
        raise Refused("\nerror: ".join(broken))


def print_recipes(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = ("recipe", "method", "objective", "base model", "hardware", "memory", "seed estimate", "trains here")
    cells = [
        (
            row["name"],
            row["method"],
            row["objective"],
            row["base_model"],
            row["hardware"],
            f"{format_bytes(row['memory_needed'])} of {format_bytes(row['memory_available'])}"
            if row["memory_available"]
            else "-",
            ", ".join(filter(None, (row["estimated_time"], row["estimated_cost"]))) or "-",
            "not yet" if row["cannot_train"] else "yes",
        )
        for row in rows
    ]
    print_table(columns, cells, "no recipe: the folder recipes/ has no *.yaml file")


def summarize_recipe(recipe: Recipe) -> dict[str, Any]:
    """Summarize a recipe; memory is in bytes per GPU, or of the host."""
    shape = known_shape(recipe)
    found = check_fit(recipe, shape, host_memory=0) if shape else None
    return {
        "name": recipe.name,
        "description": recipe.description,
        "when_to_use": recipe.when_to_use,
        "method": recipe.method,
        "objective": recipe.objective,
        "base_model": recipe.base_model.uri,
        "hardware": describe_hardware(recipe),
        "memory_needed": found.needed if found else None,
        "memory_available": found.available if found else None,
        "estimated_time": recipe.estimated_time,
        "estimated_cost": recipe.estimated_cost,
        "cannot_train": unsupported_reason(recipe),
    }


def show_recipe(name: str, as_json: bool) -> None:
    document = load_recipe(name).model_dump(mode="json", exclude_none=True)
    print_json(document) if as_json else print(yaml.safe_dump(document, sort_keys=False, width=120), end="")


def check_recipe(name: str, as_json: bool) -> None:
    recipe = load_recipe(name)
    try:
        shape = resolve_shape(recipe)
        if problem := find_contradiction(recipe, shape) or sequence_too_long_reason(recipe, shape.max_position_embeddings):
            raise BadConfiguration(problem)  # jobs with it would be refused
        found = check_fit(recipe, shape, host_memory=0)
    except BadConfiguration as problem:
        raise Refused(locate_problem(name, str(problem))) from None
    dry_run_result = run_dry_run(name)
    problems = find_differences(dry_run_result) + ([] if found.fits else [f"it {found.message}"])
    if as_json:
        memory = {"needed": found.needed, "available": found.available, "parts": vars(found.budget)}
        size = checkpoint_bytes(recipe, shape)
        report = {"problems": problems, "cannot_train": unsupported_reason(recipe)}
        print_json({"memory": memory, "checkpoint_bytes": size, "dry_run": dry_run_result, **report})
    else:
        print("\n".join(report_lines(recipe, found, checkpoint_bytes(recipe, shape), dry_run_result)))
    if problems:
        raise Refused(f"recipe '{recipe.name}' cannot be trained as it is: {'; '.join(problems)}")


def locate_problem(name: str, problem: str) -> str:
    """Prefix a problem with the recipe, or with file and line of its key."""
    if not is_recipe_file(name):
        return f"recipe '{name}': {problem}"
    text = Path(name).read_text(encoding="utf-8")
    line = find_line(text, find_named_key(problem, load_yaml(text)))
    return f"{name}{f', line {line}' if line else ''}: {problem}"


def is_recipe_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def load_recipe(name: str) -> Recipe:
    try:
        return Recipe.load(Path(name)) if is_recipe_file(name) else Recipe.named(name)
    except BadConfiguration as problem:
        raise Refused(str(problem)) from None


def run_dry_run(name: str) -> dict[str, Any]:
    """Run `recipes.dry_run` in a process of its own, because it loads torch."""
    if problem := lacking("a dry run", TRAIN):
        raise Refused(problem)
    command = [sys.executable, "-m", "recipes.dry_run", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Refused(last.removeprefix("error: "))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])[0]
    return found


def find_differences(dry_run_result: dict[str, Any]) -> list[str]:
    """Differences between the built model and the expected one."""
    return [
        f"{what} are {dry_run_result[what]:,}, expected {dry_run_result[f'{what}_expected']:,}"
        for what in ("parameters", "trainable")
        if dry_run_result[what] != dry_run_result[f"{what}_expected"]
    ]


def report_lines(recipe: Recipe, found: HardwareFit, checkpoint: int, dry_run_result: dict[str, Any]) -> list[str]:
    adapted = f" in {pluralize(dry_run_result['adapted_modules'], 'module')}" if dry_run_result["adapted_modules"] else ""
    share = dry_run_result["trainable"] / dry_run_result["parameters"]
    report = [
        f"{recipe.name}: {recipe.description}",
        f"parameters   {dry_run_result['parameters']:,}, trained {dry_run_result['trainable']:,}{adapted} ({share:.2%})",
        f"memory       {found.message}",
        *(f"  {part:<11} {format_bytes(size):>9}" for part, size in vars(found.budget).items() if size),
        f"disk         {describe_disk_usage(recipe, checkpoint)}",
        f"start        {' '.join(dry_run_result['command'])}{describe_nodes(recipe)}",
        *([f"image        {recipe.image}"] if recipe.image else []),
    ]
    if seed := ", ".join(filter(None, (recipe.estimated_time, recipe.estimated_cost))):
        report.append(f"seed         {seed} (the recipe's own figures)")
    if dry_run_result["kept"] is not None:
        kept = (
            f"{format_bytes(dry_run_result['kept'])} kept by autograd on meta tensors, "
            f"{format_bytes(dry_run_result['kept_expected'])} expected"
        )
        report.append(f"activations  {kept}")
    if dry_run_result["sharding"]:
        report.append(f"sharding     {json.dumps(dry_run_result['sharding'])}")
    if problem := unsupported_reason(recipe):
        report.append(f"note         {problem}")
    if found.fits and found.available is not None and found.needed > found.available and not found.paged:
        report.append("note         it fits only without its allowance: raise hardware.memory")
    return report


def describe_nodes(recipe: Recipe) -> str:
    nodes = recipe.distributed.num_nodes if recipe.distributed else 1
    return f" (on each of {nodes} nodes; rank and rendezvous are added at the start)" if nodes > 1 else ""
