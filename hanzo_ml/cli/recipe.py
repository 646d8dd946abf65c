"""`hanzo-ml recipe`: the ways to fine-tune that this installation has, what each needs, and a try without weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.output import AsJson, show, table
from recipes.fit import fit, gib, hardware_words
from recipes.known_architectures import known_shape
from recipes.memory import MemoryBudget
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration
from recipes.trainable import missing

app = typer.Typer(no_args_is_help=True, help=__doc__)

Name = Annotated[str, typer.Argument(help="A recipe's name, or a YAML file of your own.")]


@app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """All recipes, with what each needs of a GPU's memory."""
    rows = [row_of(Recipe.named(name)) for name in Recipe.names()]
    if as_json:
        show(rows)
        return
    table(
        ("recipe", "method", "objective", "base model", "hardware", "memory", "seed estimate", "trains here"),
        [
            (
                row["name"],
                row["method"],
                row["objective"],
                row["base_model"],
                row["hardware"],
                row["memory"] or "-",
                f"{row['estimated_time']}, {row['estimated_cost']}",
                row["cannot"] or "yes",
            )
            for row in rows
        ],
        "no recipe: the folder recipes/ has no *.yaml",
    )


def row_of(recipe: Recipe) -> dict[str, Any]:
    shape = known_shape(recipe)
    found = fit(recipe, shape, host_memory=0) if shape else None
    return {
        "name": recipe.name,
        "method": recipe.method,
        "objective": recipe.objective,
        "base_model": recipe.base_model.uri,
        "hardware": hardware_words(recipe),
        "memory": f"{gib(found.needed)} of {gib(found.available)}" if found and found.available else None,
        "fits": found.fits if found else None,
        "estimated_time": recipe.estimated_time,
        "estimated_cost": recipe.estimated_cost,
        "cannot": missing(recipe),
    }


@app.command("show")
def show_recipe(name: Name, as_json: AsJson = False) -> None:
    """A recipe, whole, with the values that hold where its file says nothing."""
    document = load(name).model_dump(mode="json", exclude_none=True)
    show(document) if as_json else print(yaml.safe_dump(document, sort_keys=False, width=120), end="")


@app.command()
def check(name: Name, as_json: AsJson = False) -> None:
    """Validate a recipe, show its memory budget, and try it at its real size without weights (takes a minute)."""
    recipe = load(name)
    shape = known_shape(recipe)
    if shape is None:
        raise Refused(f"the shape of {recipe.base_model.uri} is not known: give it as `architecture` in the recipe")
    try:
        found = fit(recipe, shape, host_memory=0)
    except BadConfiguration as problem:
        raise Refused(str(problem)) from None
    tried = dry_run(name)
    problems = differences(tried)
    if not found.fits:
        problems.append(f"it {found.words}")
    if as_json:
        budget = vars(found.budget) | {"needed": found.needed, "available": found.available, "fits": found.fits}
        show({"memory": budget, "dry_run": tried, "problems": problems, "cannot": missing(recipe)})
    else:
        print_check(recipe, found.budget, found.words, tried)
    if problems:
        raise Refused(f"recipe '{recipe.name}' does not hold: {'; '.join(problems)}")


def load(name: str) -> Recipe:
    try:
        return Recipe.load(Path(name)) if Path(name).suffix in (".yaml", ".yml") else Recipe.named(name)
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


def print_check(recipe: Recipe, budget: MemoryBudget, words: str, tried: dict[str, Any]) -> None:
    print(f"{recipe.name}: {recipe.description}")
    share = tried["trainable"] / tried["parameters"]
    adapted = f" in {tried['adapted_modules']} modules" if tried["adapted_modules"] else ""
    print(f"parameters   {tried['parameters']:,}, trained {tried['trainable']:,}{adapted} ({share:.2%})")
    print(f"memory       {words}")
    for part, size in vars(budget).items():
        if size:
            print(f"  {part:<12} {gib(size):>10}")
    if tried["kept"] is not None:
        print(f"activations  {gib(tried['kept'])} kept by autograd on meta tensors, {gib(tried['kept_expected'])} reckoned")
    print(f"start        {' '.join(tried['command'])}")
    if tried["sharding"]:
        print(f"accelerate   {json.dumps(tried['sharding'])}")
    print(f"seed         {recipe.estimated_time}, {recipe.estimated_cost} (the recipe's own figures)")
    if problem := missing(recipe):
        print(f"note         {problem}")
