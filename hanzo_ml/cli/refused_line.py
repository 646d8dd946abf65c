"""A server's refusal of a file, with the line of the file that it is about."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.once import start
from recipes.yaml_lines import line_of, named_in

SECTIONS = ("parameters", "base_config", "search_space")
"""Mappings of a file whose keys a refusal may name without them."""
OF_A_RECIPE = re.compile(r"^recipe '[^']*'")
QUOTED = re.compile(r"'([A-Za-z_]\w*(?:\.\w+)*)'")


def send(path: str, document: Mapping[str, Any], file: Path | None, key: str | None) -> Any:
    """The answer to a POST that starts what stands in `file`; in none, where other options have changed it.

    Raises:
        Refused: as the API says it, after the file and the line of the key that it names, where the file has that.
    """
    try:
        return start(path, key, json=document)
    except Refused as problem:
        line = file and line_of(file.read_text(encoding="utf-8"), place_of(str(problem), document))
        raise (Refused(f"{file}, line {line}: {problem}") if line else problem) from None


def place_of(problem: str, document: Mapping[str, Any]) -> tuple[str, ...]:
    """The key in the document that a refusal is about: one that it quotes, else the first that it names; empty: none."""
    for name in QUOTED.findall(problem):
        parts = tuple(name.split("."))
        for section, keys in sections(document):
            if parts[0] in keys:
                return (*section, *parts)
    # What is wrong with a recipe begins with its name, and is what a section changes of it, if any does.
    for words in (OF_A_RECIPE.sub("", problem), problem):
        for section, keys in sections(document):
            if place := named_in(words, keys):
                return (*section, *place)
    return ()


def sections(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    yield (), document
    for name in SECTIONS:
        if isinstance(keys := document.get(name), Mapping):
            yield (name,), keys
