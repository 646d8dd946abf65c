"""The keys that a document may have."""

from collections.abc import Iterator, Sequence
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
