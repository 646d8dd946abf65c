"""`hanzo-ml recipe`: the ways to fine-tune that this installation has, what each needs, and a try without weights.

What they print is `recipe_report`, imported when it is asked for: the schema of recipes takes longer to load than all other
commands together.
"""

from typing import Annotated

import typer

from hanzo_ml.cli.output import JsonOption

app = typer.Typer(no_args_is_help=True, help=__doc__)

Name = Annotated[str, typer.Argument(help="A recipe's name, or a YAML file of your own.")]


@app.command("list")
def list_recipes(as_json: JsonOption = False) -> None:
    """All recipes, with what each needs of a GPU's memory."""
    from hanzo_ml.cli import recipe_report

    recipe_report.list_recipes(as_json)


@app.command("show")
def show_recipe(name: Name, as_json: JsonOption = False) -> None:
    """A recipe, whole, with the values that hold where its file says nothing."""
    from hanzo_ml.cli import recipe_report

    recipe_report.show_recipe(name, as_json)


@app.command()
def check(name: Name, as_json: JsonOption = False) -> None:
    """Validate a recipe, show its memory budget, and try it at its real size without weights (takes a minute)."""
    from hanzo_ml.cli import recipe_report

    recipe_report.check_recipe(name, as_json)
