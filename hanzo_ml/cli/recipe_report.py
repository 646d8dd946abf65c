"""What `hanzo-ml recipe` prints: recipes as a table, one whole, and one tried at its real size."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.output import show, table
from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.counted import counted
from recipes.fit import Fit, fit, hardware_words, sized
from recipes.planning.hardware_fit import checkpoint_bytes, disk_words
from recipes.planning.known_architectures import known_shape, shape_of
from recipes.planning.recipe_checks import contradiction, missing, too_long
from recipes.yaml_document import yaml_document
from recipes.yaml_lines import line_of, named_in


def list_recipes(as_json: bool) -> None:
    """Raises Refused, behind the list of all others, where a recipe cannot be read."""
    rows, broken = [], []
    for name in Recipe.names():
        try:
            rows.append(described(Recipe.named(name)))
        except BadConfiguration as problem:
            broken.append(str(problem))
    show(rows) if as_json else show_table(rows)
    if broken:
        raise Refused("\nerror: ".join(broken))


def show_table(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = ("recipe", "method", "objective", "base model", "hardware", "memory", "seed estimate", "trains here")
    cells = [
        (
            row["name"],
            row["method"],
            row["objective"],
            row["base_model"],
            row["hardware"],
            f"{sized(row['memory_needed'])} of {sized(row['memory_available'])}" if row["memory_available"] else "-",
            ", ".join(filter(None, (row["estimated_time"], row["estimated_cost"]))) or "-",
            "not yet" if row["cannot_train"] else "yes",
        )
        for row in rows
    ]
    table(columns, cells, "no recipe: the folder recipes/ has no *.yaml")


def described(recipe: Recipe) -> dict[str, Any]:
    """A recipe in short; memory in bytes on one GPU, or of the host where it has none."""
    shape = known_shape(recipe)
    found = fit(recipe, shape, host_memory=0) if shape else None
    return {
        "name": recipe.name,
        "description": recipe.description,
        "when_to_use": recipe.when_to_use,
        "method": recipe.method,
        "objective": recipe.objective,
        "base_model": recipe.base_model.uri,
        "hardware": hardware_words(recipe),
        "memory_needed": found.needed if found else None,
        "memory_available": found.available if found else None,
        "estimated_time": recipe.estimated_time,
        "estimated_cost": recipe.estimated_cost,
        "cannot_train": missing(recipe),
    }


def show_recipe(name: str, as_json: bool) -> None:
    document = load(name).model_dump(mode="json", exclude_none=True)
    show(document) if as_json else print(yaml.safe_dump(document, sort_keys=False, width=120), end="")


def check(name: str, as_json: bool) -> None:
    recipe = load(name)
    try:
        shape = shape_of(recipe)
        if never := contradiction(recipe, shape) or too_long(recipe, shape.max_position_embeddings):
            raise BadConfiguration(never)  # no job with it would be taken
        found = fit(recipe, shape, host_memory=0)
    except BadConfiguration as problem:
        raise Refused(in_file(name, str(problem))) from None
    tried = dry_run(name)
    problems = differences(tried) + ([] if found.fits else [f"it {found.words}"])
    if as_json:
        memory = {"needed": found.needed, "available": found.available, "parts": vars(found.budget)}
        size = checkpoint_bytes(recipe, shape)
        said = {"problems": problems, "cannot_train": missing(recipe)}
        show({"memory": memory, "checkpoint_bytes": size, "dry_run": tried, **said})
    else:
        print("\n".join(lines(recipe, found, checkpoint_bytes(recipe, shape), tried)))
    if problems:
        raise Refused(f"recipe '{recipe.name}' does not hold: {'; '.join(problems)}")


def in_file(name: str, problem: str) -> str:
    """What is wrong with a recipe, after its file and the line of the key that it names; of a file that has that."""
    if not is_file(name):
        return f"recipe '{name}': {problem}"
    text = Path(name).read_text(encoding="utf-8")
    line = line_of(text, named_in(problem, yaml_document(text)))
    return f"{name}{f', line {line}' if line else ''}: {problem}"


def is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def load(name: str) -> Recipe:
    try:
        return Recipe.load(Path(name)) if is_file(name) else Recipe.named(name)
    except BadConfiguration as problem:
        raise Refused(str(problem)) from None


def dry_run(name: str) -> dict[str, Any]:
    """What `recipes.dry_run` found, in a process of its own: it loads torch."""
    command = [sys.executable, "-m", "recipes.dry_run", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Refused(last.removeprefix("error: "))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])[0]
    return found


def differences(tried: dict[str, Any]) -> list[str]:
    """Where the libraries build something else than was reckoned with."""
    return [
        f"{what} are {tried[what]:,}, reckoned were {tried[f'{what}_expected']:,}"
        for what in ("parameters", "trainable")
        if tried[what] != tried[f"{what}_expected"]
    ]


def lines(recipe: Recipe, found: Fit, checkpoint: int, tried: dict[str, Any]) -> list[str]:
    adapted = f" in {counted(tried['adapted_modules'], 'module')}" if tried["adapted_modules"] else ""
    share = tried["trainable"] / tried["parameters"]
    said = [
        f"{recipe.name}: {recipe.description}",
        f"parameters   {tried['parameters']:,}, trained {tried['trainable']:,}{adapted} ({share:.2%})",
        f"memory       {found.words}",
        *(f"  {part:<11} {sized(size):>9}" for part, size in vars(found.budget).items() if size),
        f"disk         {disk_words(recipe, checkpoint)}",
        f"start        {' '.join(tried['command'])}{on_each_node(recipe)}",
        *([f"image        {recipe.image}"] if recipe.image else []),
    ]
    if seed := ", ".join(filter(None, (recipe.estimated_time, recipe.estimated_cost))):
        said.append(f"seed         {seed} (the recipe's own figures)")
    if tried["kept"] is not None:
        kept = f"{sized(tried['kept'])} kept by autograd on meta tensors, {sized(tried['kept_expected'])} reckoned"
        said.append(f"activations  {kept}")
    if tried["sharding"]:
        said.append(f"sharding     {json.dumps(tried['sharding'])}")
    if problem := missing(recipe):
        said.append(f"note         {problem}")
    if found.fits and found.available is not None and found.needed > found.available and not found.paged:
        said.append("note         it fits without its allowance alone: raise hardware.memory")
    return said


def on_each_node(recipe: Recipe) -> str:
    nodes = recipe.distributed.num_nodes if recipe.distributed else 1
    return f" (on each of {nodes} nodes; what starts the job adds their rank and where they meet)" if nodes > 1 else ""
