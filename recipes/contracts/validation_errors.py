"""Describe validation errors in one line, with spelling suggestions for unknown keys."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def explain_unknown_key(path: str, known: Iterable[str]) -> str:
    """Return the message for an unknown key, such as `checkpoint.intervall`."""
    meant = suggest_spelling(path.rpartition(".")[2], known)
    return f"unknown key '{path}': " + (f"did you mean '{meant}'?" if meant else "remove it or correct its spelling")


def suggest_spelling(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to a misspelled one, or None if there is none."""
    return next(iter(get_close_matches(word, sorted(known), n=1)), None)


def list_known_keys(kind: Any, location: Sequence[Any]) -> frozenset[str]:
    """Return the valid keys of a document at a location.

    The `loc` of a Pydantic error without its last part. Parts that are no fields are list indices, mapping keys, or
    Pydantic's names of union members.
    """
    models = frozenset(find_models(kind))
    for part in location:
        named = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = frozenset(found for annotation in named for found in find_models(annotation)) if named else models
    return frozenset(name for model in models for name in model.model_fields)


def find_models(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for argument in get_args(kind):
        yield from find_models(argument)


TYPE_MESSAGES = {
    "model_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
    "string_type": "must be a text: put it in quotes",
}
"""Replacements for messages of Pydantic that name Python types instead of a solution."""


def select_first_error(error: ValidationError) -> ErrorDetails:
    """Return the first problem.

    An unknown key precedes a missing one, because it may be its misspelling.
    """
    first, *remaining = error.errors()
    unknown = (problem for problem in remaining if problem["type"] == "extra_forbidden")
    return next(unknown, first) if first["type"] == "missing" else first


def explain_first_error(error: ValidationError, kind: Any) -> str:
    """Describe the first problem of a validation error: location, problem and given value."""
    problem = select_first_error(error)
    location = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return explain_unknown_key(location, list_known_keys(kind, problem["loc"][:-1]))
    if problem["type"] == "missing":
        return f"'{location}' is missing: add it"
    message = TYPE_MESSAGES.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    # Errors between several keys name the keys in their message.
    return f"'{location}': {message} (given: {problem['input']!r:.80})" if location else message
