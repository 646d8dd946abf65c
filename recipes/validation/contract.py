"""The contract of a dataset: what each of its records must be, as a `defs.yaml` says it (specification rows B13 and D1)."""

import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from recipes.contracts.frozen_model import Frozen

Kind = Literal["string", "integer", "number", "boolean", "array", "object"]
Scalar = str | int | float | bool
SCALARS: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


def no_less(most: float | None, info: ValidationInfo, lower: Mapping[str, str]) -> float | None:
    """An upper bound. Raises ValueError where it is below the lower one: every record would be refused."""
    name = lower[str(info.field_name)]
    least = info.data.get(name)
    if most is not None and least is not None and most < least:
        raise ValueError(f"it is less than {name}, which is {least}: no record could be so")
    return most


class ColumnContract(Frozen):
    """What a column holds. Types are those of JSON, an integer is a number too. Lengths are in characters, or items."""

    type: Kind
    required: bool = Field(True, description="every record has the column")
    nullable: bool = Field(False, description="null is a value")
    minimum: float | None = None
    maximum: float | None = None
    min_length: int | None = Field(None, ge=0)
    max_length: int | None = Field(None, ge=0)
    pattern: str | None = Field(None, description="regular expression that the whole text matches")
    allowed: tuple[Scalar, ...] | None = Field(None, min_length=1)
    unique: bool = False

    @field_validator("pattern")
    @classmethod
    def is_a_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @field_validator("maximum", "max_length")
    @classmethod
    def leaves_something(cls, most: float | None, info: ValidationInfo) -> float | None:
        return no_less(most, info, {"maximum": "minimum", "max_length": "min_length"})

    @model_validator(mode="after")
    def rules_fit_the_type(self) -> Self:
        fitting = {
            "minimum": ("integer", "number"),
            "maximum": ("integer", "number"),
            "min_length": ("string", "array"),
            "max_length": ("string", "array"),
            "pattern": ("string",),
            "allowed": ("string", "integer", "number", "boolean"),
        }
        for rule, types in fitting.items():
            if getattr(self, rule) is not None and self.type not in types:
                raise ValueError(f"'{rule}' is a rule for {' and '.join(types)}, not for {self.type}")
        if strange := [value for value in self.allowed or () if type(value) not in SCALARS[self.type]]:
            raise ValueError(f"'allowed' has {strange[0]!r}, which is no {self.type}")
        return self


ORDER_WORD = re.compile(r"[a-z]+")
ORDER = re.compile(r"[a-z ()|?*+]+")


class ChatContract(Frozen):
    """What a conversation is: a list of messages with `role` and `content`.

    `order` is a pattern of roles such as `system? (user assistant)+`, with `?`, `*`, `+`, `|` and brackets as in regular
    expressions.
    """

    column: str = "messages"
    order: str = "system? (user assistant)+"
    required: tuple[str, ...] = ()
    min_turns: int = Field(1, ge=1)
    max_turns: int | None = Field(None, ge=1)
    min_length: int = Field(1, ge=0, description="characters of each message's content")
    max_length: int | None = Field(None, ge=1)

    @field_validator("max_turns", "max_length")
    @classmethod
    def leaves_something(cls, most: int | None, info: ValidationInfo) -> float | None:
        return no_less(most, info, {"max_turns": "min_turns", "max_length": "min_length"})

    @field_validator("order")
    @classmethod
    def is_an_order(cls, order: str) -> str:
        if not ORDER.fullmatch(order):
            raise ValueError("write roles, and between them only spaces, brackets and ? * + |")
        try:
            re.compile(order_pattern(order))
        except re.error as error:
            raise ValueError(f"not an order of roles: {error}") from None
        return order


def order_pattern(order: str) -> str:
    """The order as a regular expression over roles that are each followed by one space."""
    return ORDER_WORD.sub(lambda role: f"(?:{role[0]}_)", order).replace(" ", "").replace("_", " ")


class Contract(Frozen):
    """All rules. Without any, every record fits."""

    columns: dict[str, ColumnContract] = {}
    closed: bool = Field(False, description="no record has columns that are not named here")
    conversation: ChatContract | None = None

    @property
    def has_rules(self) -> bool:
        return bool(self.columns or self.closed or self.conversation)
