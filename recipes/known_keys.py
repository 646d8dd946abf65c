"""The keys that a document may have, and the one that was meant where another stands there."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel


def known_keys(kind: Any, where: Sequence[Any]) -> frozenset[str]:
    """The keys that a document of a type may have at a place, which is the `loc` of a Pydantic error without its last part.

    What is no field there is a place in a list, a key of a mapping, or Pydantic's name of a union's member.
    """
    models = frozenset(models_of(kind))
    for part in where:
        named = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = frozenset(found for annotation in named for found in models_of(annotation)) if named else models
    return frozenset(name for model in models for name in model.model_fields)


def models_of(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for argument in get_args(kind):
        yield from models_of(argument)


def unknown_key(path: str, known: Iterable[str]) -> str:
    """What to say of a key that nobody knows, such as `checkpoint.intervall`."""
    meant = meant_by(path.rpartition(".")[2], known)
    return f"unknown key '{path}': " + (f"did you mean '{meant}'?" if meant else "remove it or correct its spelling")


def meant_by(word: str, known: Iterable[str]) -> str | None:
    """The word of those that are known which a misspelled one is nearest to; none where all of them are others."""
    return next(iter(get_close_matches(word, sorted(known), n=1)), None)
