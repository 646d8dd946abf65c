"""The contract of a dataset, and the parameters of validate and find_leaks."""

import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.parameters import NearDuplicates

# The contract of a dataset: what each of its records must be, as a `defs.yaml` says it (specification rows B13 and D1).

Kind = Literal["string", "integer", "number", "boolean", "array", "object"]
Scalar = str | int | float | bool
SCALAR_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


def check_bounds(most: float | None, info: ValidationInfo, lower: Mapping[str, str]) -> float | None:
    """An upper bound. Raises ValueError where it is below the lower one: every record would be refused."""
    name = lower[str(info.field_name)]
    least = info.data.get(name)
    if most is not None and least is not None and most < least:
        raise ValueError(f"it is less than {name}, which is {least}: no record could be so")
    return most


class ColumnContract(FrozenModel):
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
    def validate_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @field_validator("maximum", "max_length")
    @classmethod
    def validate_upper_bound(cls, most: float | None, info: ValidationInfo) -> float | None:
        return check_bounds(most, info, {"maximum": "minimum", "max_length": "min_length"})

    @model_validator(mode="after")
    def validate_rules(self) -> Self:
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
        if invalid := [value for value in self.allowed or () if type(value) not in SCALAR_TYPES[self.type]]:
            raise ValueError(f"'allowed' has {invalid[0]!r}, which is no {self.type}")
        return self


ORDER_ROLE = re.compile(r"[a-z]+")
ORDER_CHARACTERS = re.compile(r"[a-z ()|?*+]+")


class ChatContract(FrozenModel):
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
    def validate_upper_bound(cls, most: int | None, info: ValidationInfo) -> float | None:
        return check_bounds(most, info, {"max_turns": "min_turns", "max_length": "min_length"})

    @field_validator("order")
    @classmethod
    def validate_order(cls, order: str) -> str:
        if not ORDER_CHARACTERS.fullmatch(order):
            raise ValueError("write roles, and between them only spaces, brackets and ? * + |")
        try:
            re.compile(compile_order(order))
        except re.error as error:
            raise ValueError(f"not an order of roles: {error}") from None
        return order


def compile_order(order: str) -> str:
    """The order as a regular expression over roles that are each followed by one space."""
    return ORDER_ROLE.sub(lambda role: f"(?:{role[0]}_)", order).replace(" ", "").replace("_", " ")


class Contract(FrozenModel):
    """All rules. Without any, every record fits."""

    columns: dict[str, ColumnContract] = {}
    closed: bool = Field(False, description="no record has columns that are not named here")
    conversation: ChatContract | None = None

    @property
    def has_rules(self) -> bool:
        return bool(self.columns or self.closed or self.conversation)


# What the programs `validate` and `find_leaks` are told.


class Slices(FrozenModel):
    """By which columns a dataset is looked at for bias, and whose balance within each slice matters."""

    columns: tuple[str, ...] = ()
    label: str | None = Field(None, description="column that holds what a model would learn to answer")


class Measures(FrozenModel):
    """What is measured beside what always is."""

    timestamp: str | None = Field(None, description="column that says when a record was made: ISO 8601, or Unix seconds")
    slices: Slices = Slices()
    near_duplicates: NearDuplicates | None = NearDuplicates()
    languages: bool = True
    sample: int = Field(5000, ge=100, description="records, about, by which distributions are described and compared")


class ValidateParameters(FrozenModel):
    """Check a version's records against a contract, and describe them."""

    contract: Contract = Contract()
    measures: Measures = Measures()
    reference: str = Field("", description="what the input `reference` is called, as NAME@VERSION")


class FindLeaksParameters(FrozenModel):
    """Look for a test split's records in what was trained on. `names` maps an input's role to what people call it."""

    near: NearDuplicates = NearDuplicates()
    names: dict[str, str] = {}
