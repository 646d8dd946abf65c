"""Base classes of exchanged types and of YAML documents."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

UNSTORABLE_CHARACTERS = re.compile("[\x00\ud800-\udfff]")
"""PostgreSQL cannot store NUL, and half a surrogate pair is not a character."""


def refuse_blank(name: str) -> str:
    """Return the name; raise ValueError if it is only whitespace, which users cannot see."""
    if name.isspace():
        raise ValueError("it is blank: use at least one visible character")
    return name


Name = Annotated[str, AfterValidator(refuse_blank)]


class FrozenModel(BaseModel):
    """Base of all exchanged types: immutable, and unknown keys are rejected by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class YamlModel(FrozenModel):
    """Base of YAML documents, stricter than Pydantic about numbers and text.

    YAML reads `yes` and `on` as true, which Pydantic would convert to 1, and `.inf` as a number: a run with `max_steps: yes`
    trained one step and succeeded, and one with `learning_rate: 1e400` started. Text with an escaped `\\0` was accepted and
    failed when it was stored.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def refuse_boolean_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        is_boolean = isinstance(value, bool) and accepts_numbers(cls.model_fields[str(info.field_name)].annotation)
        return refuse_boolean(value) if is_boolean else value

    @field_validator("*", mode="before")
    @classmethod
    def refuse_unstorable_text(cls, value: Any, info: ValidationInfo) -> Any:
        for place, text in iterate_texts(value, str(info.field_name)):
            if UNSTORABLE_CHARACTERS.search(text):
                raise ValueError(f"{place} contains a character that cannot be stored: NUL or half of a surrogate pair")
        return value


def iterate_texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield all strings in a YAML or JSON value with their location.

    Typed values are validated already.
    """
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from iterate_texts(key, place)
            yield from iterate_texts(member, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, member in enumerate(value):
            yield from iterate_texts(member, f"{place}[{number}]")


def accepts_numbers(kind: Any) -> bool:
    """Return whether a type, or one of its components, is a number."""
    return kind in (int, float) or any(map(accepts_numbers, get_args(kind)))


def refuse_boolean(value: Any) -> Any:
    """Return the value; raise ValueError if it is a boolean."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number: YAML reads yes, on and true as {str(value).lower()}")
    return value
