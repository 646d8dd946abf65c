"""JSON responses that know the type of their body.

An endpoint that returns `TypedResponse[T]` declares its response type by that, to mypy and to the OpenAPI document.
"""

import json
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar

from fastapi import Response
from pydantic import BaseModel
from typing_extensions import TypedDict

T = TypeVar("T")


class Deleted(TypedDict):
    """`deleted` is what it was called."""

    deleted: str


class TypedResponse(Response, Generic[T]):
    """A response whose body is the JSON of a T."""

    media_type = "application/json"


def json_response(content: T, status_code: int = 200) -> TypedResponse[T]:
    """The JSON of a TypedDict, a dataclass or a Pydantic model, and of what such contain. NaN is an error."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=as_json)
    return TypedResponse(text.encode(), status_code)


def as_json(value: Any) -> Any:
    """A value of a type that `json` does not know as one that it does."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    raise TypeError(f"{type(value).__name__} has no JSON")
