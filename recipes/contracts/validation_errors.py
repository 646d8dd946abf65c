"""Explain validation errors in one line, with spelling suggestions for unknown keys."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def explain_unknown_key(path: str, known: Iterable[str]) -> str:
    """What to say of a key that nobody knows, such as `checkpoint.intervall`."""
    meant = suggest_spelling(path.rpartition(".")[2], known)
    return f"unknown key '{path}': " + (f"did you mean '{meant}'?" if meant else "remove it or correct its spelling")


def suggest_spelling(word: str, known: Iterable[str]) -> str | None:
    """The word of those that are known which a misspelled one is nearest to; none where all of them are others."""
    return next(iter(get_close_matches(word, sorted(known), n=1)), None)


def list_known_keys(kind: Any, location: Sequence[Any]) -> frozenset[str]:
    """The keys that a document of a type may have at a place, which is the `loc` of a Pydantic error without its last part.

    What is no field there is a place in a list, a key of a mapping, or Pydantic's name of a union's member.
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
"""What to say instead of Pydantic's words, which name classes of ours, or of Python, and not what to do."""


def select_first_error(error: ValidationError) -> ErrorDetails:
    """Its first problem. A key that nobody knows comes before one that is missing: it may be that one, misspelled."""
    first, *remaining = error.errors()
    unknown = (problem for problem in remaining if problem["type"] == "extra_forbidden")
    return next(unknown, first) if first["type"] == "missing" else first


def explain_first_error(error: ValidationError, kind: Any) -> str:
    """The first problem of a validation error as one line: where, what is wrong, and what was given for that type."""
    problem = select_first_error(error)
    location = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return explain_unknown_key(location, list_known_keys(kind, problem["loc"][:-1]))
    if problem["type"] == "missing":
        return f"'{location}' is missing: add it"
    message = TYPE_MESSAGES.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    # What is wrong between keys says of itself which they are.
    return f"'{location}': {message} (given: {problem['input']!r:.80})" if location else message
