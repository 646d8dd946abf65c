"""Report errors of a configuration file with file, line and key."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from hanzo_ml.cli.connection import Refused
from recipes.contracts.yaml_reader import find_line, find_named_key

# Values that YAML has and JSON does not: dates, infinity.


def check_json(document: Mapping[str, Any], file: Path | None) -> None:
    """Raises Refused for a value that JSON cannot represent, naming file, line, key and remedy."""
    for key, value in document.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError):
            where, problem = next(
                find_invalid_values(value, (key,)), ((key,), "holds a value that JSON cannot represent: put it in quotes")
            )
            line = file and find_line(file.read_text(encoding="utf-8"), where)
            place = f"{file}, line {line}: " if line else ""
            raise Refused(f"{place}'{'.'.join(map(str, where))}' {problem}") from None


def find_invalid_values(value: Any, where: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Find values that JSON cannot represent, each with its path and a remedy."""
    if isinstance(value, date):
        yield where, "is read by YAML as a date, which JSON does not have: put it in quotes"
    elif isinstance(value, float) and not math.isfinite(value):
        yield where, f"is {value}: write a number"
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from find_invalid_values(below, (*where, key))
    elif isinstance(value, list):
        for place, below in enumerate(value):
            yield from find_invalid_values(below, (*where, place))


SECTIONS = ("parameters", "base_config", "search_space")
"""Sections whose keys a refusal may name without the section."""
RECIPE_PROBLEM = re.compile(r"^recipe '[^']*'")
MLFLOW_SUFFIX = " See the API docs for more information about request parameters."
"""End of every error of MLflow's API, meaningless to the author of a file."""
MISSING_VALUE = re.compile(r"Missing value for required parameter '([^']+)'\.?")
NOT_A_STRING = re.compile(r"Input should be a valid string\. Hint: Value was of type '(?:int|float|bool)'\.")
QUOTED_KEY = re.compile(r"'([A-Za-z_]\w*(?:\.\w+)*)'")


@contextmanager
def locate_refusal(document: Mapping[str, Any], file: Path | None) -> Iterator[None]:
    """Add file and line to refusals of a call that sends the document of `file`.

    `file` is None if other options have changed the document.

    Raises:
        Refused: the message of the API, after the file and the line of the key that it names.
    """
    try:
        yield
    except Refused as problem:
        message = rephrase_problem(str(problem))
        line_number = file and find_line(file.read_text(encoding="utf-8"), find_key(message, document))
        in_file = (
            f"{file}, line {line_number}: "
            if line_number
            else f"{file}: "
            if file and MISSING_VALUE.match(str(problem))
            else ""
        )
        raise Refused(f"{in_file}{message}") from None


def rephrase_problem(problem: str) -> str:
    """Rephrase a refusal of the API for the author of a file."""
    message = NOT_A_STRING.sub("it must be a text: put it in quotes", problem.removesuffix(MLFLOW_SUFFIX))
    return MISSING_VALUE.sub(r"'\1' is missing or empty: give it a value", message)


def find_key(problem: str, document: Mapping[str, Any]) -> tuple[str, ...]:
    """Path of the key that a refusal quotes, else names first; empty if none."""
    for name in QUOTED_KEY.findall(problem):
        parts = tuple(name.split("."))
        for section, keys in iterate_sections(document):
            if parts[0] in keys:
                return (*section, *parts)
    # A problem of a recipe begins with the recipe's name: search the keys that a section changes first.
    for words in (RECIPE_PROBLEM.sub("", problem), problem):
        for section, keys in iterate_sections(document):
            if place := find_named_key(words, keys):
                return (*section, *place)
    return ()


def iterate_sections(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    yield (), document
    for name in SECTIONS:
        if isinstance(keys := document.get(name), Mapping):
            yield (name,), keys
