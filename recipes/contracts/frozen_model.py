"""Bases of the types: of those that travel, and of what people write in YAML."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

UNSTORABLE_CHARACTERS = re.compile("[\x00\ud800-\udfff]")
"""PostgreSQL knows no NUL, and half a surrogate pair is no character."""


def refuse_blank(name: str) -> str:
    """The name as it is; nobody can tell one of spaces alone from another, or from none."""
    if name.isspace():
        raise ValueError("it is blank: give a name that can be seen")
    return name


Name = Annotated[str, AfterValidator(refuse_blank)]


class FrozenModel(BaseModel):
    """Base of every type that travels: immutable, and a key nobody knows is refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class YamlModel(FrozenModel):
    """Base of what people write in YAML: there `yes` and `on` are true, which Pydantic takes for 1, and `.inf` is a number.

    A run of `max_steps: yes` trained one step, and ended well; one of `learning_rate: 1e400` began. A text may be escaped
    there: one with `\\0` was taken, and failed where it was to be kept.
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
                raise ValueError(f"{place} holds a character that cannot be stored: NUL, or half of one")
        return value


def iterate_texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Of a value as YAML or JSON has it: the texts that it is made of, and where. What is a type already was looked at."""
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
    """Whether numbers are of a type, or of one that it is made of."""
    return kind in (int, float) or any(map(accepts_numbers, get_args(kind)))


def refuse_boolean(value: Any) -> Any:
    """What is given for a number, as it is. Raises ValueError where it is none."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number: YAML reads yes, on and true as {str(value).lower()}")
    return value
