"""Dataset contracts, and the parameters of the programs validate and find_leaks."""

import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.parameters import NearDuplicates

# The contract of a dataset, as written in a `defs.yaml`: rules that each of its records must satisfy.

Kind = Literal["string", "integer", "number", "boolean", "array", "object"]
Scalar = str | int | float | bool
SCALAR_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


def check_bounds(most: float | None, info: ValidationInfo, lower: Mapping[str, str]) -> float | None:
    """Validate an upper bound.

    Raises ValueError if it is below the lower one: every record would be rejected.
    """
    name = lower[str(info.field_name)]
    least = info.data.get(name)
    if most is not None and least is not None and most < least:
        raise ValueError(f"it is less than {name}, which is {least}: no record could satisfy both")
    return most


class ColumnContract(FrozenModel):
    """Rules for a column.

    Types are those of JSON; an integer is a number too. Lengths are in characters or items.
    """

    type: Kind
    required: bool = Field(True, description="every record must have the column")
    nullable: bool = Field(False, description="null is allowed")
    minimum: float | None = None
    maximum: float | None = None
    min_length: int | None = Field(None, ge=0)
    max_length: int | None = Field(None, ge=0)
    pattern: str | None = Field(None, description="regular expression that must match the whole text")
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
            raise ValueError(f"'allowed' has {invalid[0]!r}, which is not of type {self.type}")
        return self


ORDER_ROLE = re.compile(r"[a-z]+")
ORDER_CHARACTERS = re.compile(r"[a-z ()|?*+]+")


class ChatContract(FrozenModel):
    """Rules for a conversation: a list of messages with `role` and `content`.

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
    """Compile the order to a regular expression over roles, each followed by one space."""
    return ORDER_ROLE.sub(lambda role: f"(?:{role[0]}_)", order).replace(" ", "").replace("_", " ")


class Contract(FrozenModel):
    """A dataset's contract. Without rules every record is valid."""

    columns: dict[str, ColumnContract] = {}
    closed: bool = Field(False, description="reject columns that are not listed here")
    conversation: ChatContract | None = None

    @property
    def has_rules(self) -> bool:
        return bool(self.columns or self.closed or self.conversation)


# Parameters of the programs `validate` and `find_leaks`.


class Slices(FrozenModel):
    """Columns that define slices for bias checks, and the label whose balance is compared."""

    columns: tuple[str, ...] = ()
    label: str | None = Field(None, description="column with the label or answer that a model learns")


class Measures(FrozenModel):
    """Optional measurements in addition to the standard ones."""

    timestamp: str | None = Field(None, description="column with a record's creation time: ISO 8601 or Unix seconds")
    slices: Slices = Slices()
    near_duplicates: NearDuplicates | None = NearDuplicates()
    languages: bool = True
    sample: int = Field(5000, ge=100, description="approximate number of records sampled for distributions")


class ValidateParameters(FrozenModel):
    """Check a version's records against a contract, and compute statistics."""

    contract: Contract = Contract()
    measures: Measures = Measures()
    reference: str = Field("", description="name of the input `reference`, as NAME@VERSION")


class FindLeaksParameters(FrozenModel):
    """Search training data for a test split's records.

    `names` maps an input's role to its name for users.
    """

    near: NearDuplicates = NearDuplicates()
    names: dict[str, str] = {}
