"""List, show and check recipes: the ways to fine-tune that this installation has.

`recipe_report` prints them. It is imported on demand: the schema of recipes takes longer to load than all other commands.
"""

from typing import Annotated

import typer

from hanzo_ml.cli.output import JsonOption

app = typer.Typer(no_args_is_help=True, help="List, show and check recipes.")

Name = Annotated[str, typer.Argument(help="Name of a recipe, or a YAML file.")]


@app.command("list")
def list_recipes(as_json: JsonOption = False) -> None:
    """List recipes with the GPU memory that each needs."""
    from hanzo_ml.cli import recipe_report

    recipe_report.list_recipes(as_json)


@app.command("show")
def show_recipe(name: Name, as_json: JsonOption = False) -> None:
    """Show a recipe with all its values, defaults included."""
    from hanzo_ml.cli import recipe_report

    recipe_report.show_recipe(name, as_json)


@app.command()
def check(name: Name, as_json: JsonOption = False) -> None:
    """Validate a recipe, show its memory budget, and build its model without weights."""
    from hanzo_ml.cli import recipe_report

    recipe_report.check_recipe(name, as_json)
