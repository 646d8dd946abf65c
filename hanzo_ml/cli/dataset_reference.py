"""Find the dataset version that NAME or NAME@VERSION names."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from hanzo_ml.cli.connection import Refused, iterate_pages

Reference = Annotated[
    str, typer.Argument(metavar="NAME@VERSION", help="Dataset version; NAME alone means its newest version.")
]


def find_version(reference: str) -> dict[str, Any]:
    """Find a version by NAME or NAME@VERSION.

    An incomplete reference, as from an unset shell variable, is refused: the command may be a deletion.
    """
    name, at, number = reference.partition("@")
    if not name or (at and not number.isdecimal()):
        raise Refused(f"'{reference}' is not a dataset: write NAME or NAME@VERSION, such as {name or 'my-data'}@1")
    found = [each for each in iterate_versions(name) if not at or str(each["version"]) == number]
    if not found:
        raise Refused(f"there is no dataset '{reference}': see `hanzo-ml dataset list`")
    return found[-1]


def iterate_versions(name: str | None, tags: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """All versions of a dataset, or of all datasets, that have the tags; newest last."""
    params: dict[str, Any] = {"tags": list(tags)} | ({"name": name} if name else {})
    return iterate_pages("/v1/datasets", "datasets", params)
