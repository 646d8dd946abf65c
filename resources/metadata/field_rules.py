"""What a dataset version may be called, and what may be said of it. Pure functions without a database."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.canonical_json import canonical_json
from recipes.contracts.frozen_model import UNSTORABLE
from resources.errors import invalid
from resources.metadata.tracking_rules import refuse_unstorable

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,249}")
VERSION = re.compile(r"[0-9]{1,9}")


def checked_name(name: str) -> str:
    """A name that can stand in a path of the object store."""
    if not NAME.fullmatch(name) or ".." in name:
        raise invalid(
            f"dataset name {name!r} is not allowed: use letters, digits, '_', '-' and '.', and start with a letter or digit"
        )
    return name


def named_version(reference: str) -> tuple[str, int | None]:
    """The name and the number that `NAME` or `NAME@VERSION` says. Raises 400 on anything else."""
    name, at, number = reference.partition("@")
    if not name or (at and not VERSION.fullmatch(number)):
        raise invalid(f"'{reference}' is no dataset: write NAME or NAME@VERSION, such as {name or 'my-data'}@1")
    return name, int(number) if at else None


def checked_tags(tags: Sequence[str]) -> list[str]:
    """Tags that every database can look for. Raises 400."""
    if bad := [tag for tag in tags if not tag.strip() or UNSTORABLE.search(tag)]:
        raise invalid(f"tag {bad[0][:100]!r} is not allowed: write a text, without control characters")
    return list(tags)


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata that comes back as JSON: one value without a form in it, and no list of versions could be answered."""
    try:
        canonical_json(metadata)
    except (ValueError, RecursionError):
        raise invalid(
            "metadata has a value that JSON has not, such as NaN, or is nested too deeply: write null, or a text"
        ) from None
    refuse_unstorable(metadata, "metadata")
    return dict(metadata)
