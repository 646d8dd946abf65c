"""A server's refusal of a file, with the line of the file that it is about."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hanzo_ml.cli.connection import Refused
from recipes.yaml_lines import line_of, named_in

SECTIONS = ("parameters", "base_config", "search_space")
"""Mappings of a file whose keys a refusal may name without them."""
OF_A_RECIPE = re.compile(r"^recipe '[^']*'")
OF_MLFLOW = " See the API docs for more information about request parameters."
"""What every error of MLflow's API ends with; who has written a file has none."""
MISSING = re.compile(r"Missing value for required parameter '([^']+)'\.?")
NO_TEXT = re.compile(r"Input should be a valid string\. Hint: Value was of type '(?:int|float|bool)'\.")
QUOTED = re.compile(r"'([A-Za-z_]\w*(?:\.\w+)*)'")


@contextmanager
def about(document: Mapping[str, Any], file: Path | None) -> Iterator[None]:
    """Around a call with what stands in `file`; in none, where other options have changed it.

    Raises:
        Refused: as the API says it, after the file and the line of the key that it names, where the file has that.
    """
    try:
        yield
    except Refused as problem:
        said = in_words(str(problem))
        line = file and line_of(file.read_text(encoding="utf-8"), place_of(said, document))
        in_file = f"{file}, line {line}: " if line else f"{file}: " if file and MISSING.match(str(problem)) else ""
        raise Refused(f"{in_file}{said}") from None


def in_words(problem: str) -> str:
    """A refusal of the API as one of a file: with what to do, and without what is said to programs."""
    said = NO_TEXT.sub("it must be a text, put it in quotes", problem.removesuffix(OF_MLFLOW))
    return MISSING.sub(r"'\1' is missing or empty: give it a value", said)


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
