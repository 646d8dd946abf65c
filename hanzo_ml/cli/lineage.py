"""`hanzo-ml model data`: what data was this model trained on, and was personal data included?"""

from typing import Any

from rich.console import Console
from rich.tree import Tree

from hanzo_ml.cli.connection import call
from hanzo_ml.cli.output import AsJson, show
from hanzo_ml.cli.terminal import in_markup
from recipes.counted import counted


def data(name: str, version: int, as_json: AsJson = False) -> None:
    """What data a version was trained on, and what is known of personal data in it."""
    found = call("GET", f"/v1/models/{name}/versions/{version}/data")
    if as_json:
        show(found)
    else:
        print_data(found)


def print_data(found: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True, width=10_000)
    root = Tree(in_markup(f"{found['name']} version {found['version']}"))
    for use in found["datasets"]:
        branch = root.add(
            f"{in_markup(use['dataset'])} [dim]{counted(use['records'], 'record')}, {in_markup(use['digest'][:12])}[/dim]"
        )
        for role, count in use["splits"].items():
            branch.add(f"{in_markup(role)}: {'? records' if count is None else counted(count, 'record')}")
        if not use["splits"]:
            branch.add("used through what was made of it")
        if use["made_of"]:
            branch.add(f"made of {in_markup(', '.join(use['made_of']))}")
        branch.add(f"transform: {in_markup(transform(use['transform']))}")
        branch.add(f"personal data: {in_markup(personal_data(use['personal_data']))}")
    for uri in found["base_models"]:
        root.add(f"base model {in_markup(uri)} [dim](its own training data is not recorded here)[/dim]")
    for logged in found["logged"]:
        root.add(f"logged by the run: {in_markup(logged['name'])} [dim]{in_markup(logged['digest'])}, not checked[/dim]")
    console.print(root)
    if not found["datasets"]:
        console.print("no dataset is recorded for it")
    console.print(f"personal data in what it was trained on: {in_markup(found['personal_data'])}")


def transform(value: Any) -> str:
    """A transform as `key value` pairs; what nests is told by its path."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} {each}" for key, each in flat(value))


def flat(value: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, each in value.items():
        path = f"{above}{key}"
        pairs += flat(each, f"{path}.") if isinstance(each, dict) else [(path, each)]
    return pairs


def personal_data(known: dict[str, Any]) -> str:
    """The answer, and what it rests on."""
    parts = [
        f"{what} {', '.join(f'{count:,} {kind}' for kind, count in known[key].items()) or 'nothing'}"
        for key, what in (("found", "a validation found"), ("masked", "its preparation masked"))
        if known[key] is not None
    ]
    return "; ".join([known["included"], *parts])
