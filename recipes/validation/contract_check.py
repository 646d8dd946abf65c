"""Records against their contract, with pandera on polars: what does not fit, by line, column and reason."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandera.polars as pa
import polars as pl
from numpy.typing import NDArray
from pandera.errors import SchemaErrors

from recipes.contracts.job import BadConfiguration
from recipes.contracts.validation_results import NAMED, Violation, Violations
from recipes.validation.contract import ChatContract, ColumnContract, Contract, order_pattern
from recipes.validation.kinds import column, double
from recipes.validation.record_blocks import Block

SHOWN = 80
KIND, LENGTH, TURNS, SHORTEST, LONGEST = "type", "length", "turns", "shortest message", "longest message"
INT64 = range(-(2**63), 2**63)


class Conformance:
    """Collects the violations of a contract over blocks of records."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._schema = schema_of(contract)
        self._by_reason: Counter[str] = Counter()
        self._first: list[Violation] = []
        self._records = 0
        self._unique = {name: Unique() for name, rules in contract.columns.items() if rules.unique}

    def see(self, block: Block) -> None:
        broken = [*failures(self._schema, frame_of(self._contract, block)), *self._strangers(block)]
        rows = sorted({row for row, _, _ in broken})
        self._records += len(rows)
        self._by_reason.update(f"{name}: {reason}" for _, name, reason in broken)
        for row, name, reason in sorted(broken)[: max(0, NAMED - len(self._first))]:
            value = block.rows[row].get(name, "(no such column)")
            self._first.append(Violation(line=block.start + row, column=name, reason=reason, value=f"{value}"[:SHOWN]))
        for name, unique in self._unique.items():
            unique.see(block, name)

    def violations(self) -> Violations:
        first, records, by_reason = self._first, self._records, Counter(self._by_reason)
        for name, unique in self._unique.items():
            lines, heads = unique.doubles()
            records += len(lines)
            if len(lines):
                by_reason[f"{name}: must be unique"] = len(lines)
            pairs = zip(lines[:NAMED].tolist(), heads[:NAMED].tolist(), strict=True)
            reasons = ((line, f"must be unique: line {head} has the same") for line, head in pairs)
            first = [*first, *(Violation(line=line, column=name, reason=reason) for line, reason in reasons)]
        return Violations(
            count=by_reason.total(),
            records=records,
            by_reason=dict(by_reason.most_common(NAMED)),
            first=tuple(sorted(first, key=lambda violation: violation.line)[:NAMED]),
        )

    def _strangers(self, block: Block) -> Iterator[tuple[int, str, str]]:
        if self._contract.closed:
            known = {*self._contract.columns, *([chat.column] if (chat := self._contract.conversation) else [])}
            for row, record in enumerate(block.rows):
                for name in record.keys() - known:
                    yield row, name, "is not a column of the contract"


def failures(schema: pa.DataFrameSchema, frame: pl.DataFrame) -> list[tuple[int, str, str]]:
    """(row, column, reason) of all that does not fit."""
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as errors:
        cases = errors.failure_cases.select("index", "column", "check").rows()
        return [(int(row), name.partition("\0")[0], reason) for row, name, reason in cases]
    return []


def schema_of(contract: Contract) -> pa.DataFrameSchema:
    """The contract as pandera knows it: for each column its values, and apart from them their types and lengths.

    A polars column has one type, a column of JSON lines may have several: the kinds are a column of their own.
    """
    columns: dict[str, pa.Column] = {}
    for name, rules in contract.columns.items():
        columns |= columns_of(name, rules)
    if contract.conversation is not None:
        columns |= columns_of_conversation(contract.conversation)
    return pa.DataFrameSchema(columns)


def columns_of(name: str, rules: ColumnContract) -> dict[str, pa.Column]:
    kinds = {rules.type, "integer"} if rules.type == "number" else {rules.type}
    kinds |= {"null"} if rules.nullable else set()
    kinds |= set() if rules.required else {"missing"}
    wanted = " or ".join([rules.type, *(["null"] if rules.nullable else [])])
    made = {f"{name}\0{KIND}": pa.Column(pl.String, is_in(sorted(kinds), f"must be {wanted}"))}
    bounds = between(rules.minimum, rules.maximum, "must be")
    if rules.allowed is not None:
        allowed = [TAKEN[rules.type](value) for value in rules.allowed]
        bounds.append(is_in(allowed, f"must be one of {', '.join(map(str, rules.allowed))}"))
    if rules.pattern is not None:
        bounds.append(matches(name, rules.pattern))
    if bounds:
        made[name] = pa.Column(TYPES[rules.type], bounds, nullable=True)
    if lengths := between(rules.min_length, rules.max_length, "its length must be"):
        made[f"{name}\0{LENGTH}"] = pa.Column(pl.Int64, lengths, nullable=True)
    return made


def columns_of_conversation(chat: ChatContract) -> dict[str, pa.Column]:
    name = chat.column
    order = pa.Check.str_matches(f"^{order_pattern(chat.order)}$", error=f"the order of roles must be {chat.order}")
    has = [pa.Check.str_contains(f"{role} ", error=f"must have a message of the {role}") for role in chat.required]
    made = {
        f"{name}\0{KIND}": pa.Column(pl.String, is_in(["messages"], "must be a list of messages with role and content")),
        name: pa.Column(pl.String, [order, *has], nullable=True),
        f"{name}\0{TURNS}": pa.Column(
            pl.Int64, between(chat.min_turns, chat.max_turns, "its messages must be"), nullable=True
        ),
    }
    if shortest := between(chat.min_length, None, "each message's length must be"):
        made[f"{name}\0{SHORTEST}"] = pa.Column(pl.Int64, shortest, nullable=True)
    if longest := between(None, chat.max_length, "each message's length must be"):
        made[f"{name}\0{LONGEST}"] = pa.Column(pl.Int64, longest, nullable=True)
    return made


def is_in(values: Sequence[Any], error: str) -> pa.Check:
    return pa.Check.isin(values, error=error)


def matches(name: str, pattern: str) -> pa.Check:
    """Raises BadConfiguration for a pattern that Python knows, and polars does not."""
    whole = rf"^(?:{pattern})$"
    try:
        pl.Series([""]).str.contains(whole)
    except pl.exceptions.ComputeError:
        raise BadConfiguration(
            f"contract.columns.{name}.pattern: {pattern} cannot be checked: write it without look-around, references back "
            r"and \Z"
        ) from None
    return pa.Check.str_matches(whole, error=f"must match {pattern}")


def between(least: float | None, most: float | None, what: str) -> list[pa.Check]:
    made = [] if least is None else [pa.Check.ge(least, error=f"{what} at least {least:g}")]
    return made if most is None else [*made, pa.Check.le(most, error=f"{what} at most {most:g}")]


TYPES: dict[str, Any] = {"string": pl.String, "integer": pl.Int64, "number": pl.Float64, "boolean": pl.Boolean}
TAKEN: dict[str, Callable[[Any], Any]] = {
    "string": lambda value: value if type(value) is str else None,
    "integer": lambda value: min(max(value, INT64[0]), INT64[-1]) if type(value) is int else None,
    "number": lambda value: double(value) if type(value) in (int, float) else None,
    "boolean": lambda value: value if type(value) is bool else None,
}
"""A value as polars has it, which of numbers too large for it is the nearest; None of those of another type."""


def frame_of(contract: Contract, block: Block) -> pl.DataFrame:
    """The columns of `schema_of`, for the records of a block. Values of another type than the contract's are null."""
    made: dict[str, pl.Series] = {}
    for name, rules in contract.columns.items():
        values, kinds = column(block.rows, name)
        made[f"{name}\0{KIND}"] = pl.Series(kinds, dtype=pl.String)
        if rules.type in TAKEN:
            made[name] = pl.Series(map(TAKEN[rules.type], values), dtype=TYPES[rules.type])
        if rules.type in ("string", "array"):
            fitting = zip(values, kinds, strict=True)
            sizes = [len(value) if kind == rules.type else None for value, kind in fitting]
            made[f"{name}\0{LENGTH}"] = pl.Series(sizes, dtype=pl.Int64)
    if contract.conversation is not None:
        made |= conversations(contract.conversation.column, block)
    return pl.DataFrame(made)


def conversations(name: str, block: Block) -> dict[str, pl.Series]:
    """Of each conversation: whether it is one, its roles in their order, its turns, its shortest and longest content."""
    found = [turns_of(row.get(name)) for row in block.rows]
    lengths = [[length for _, length in turns or ()] for turns in found]
    roles = ["".join(f"{role} " for role, _ in turns) if turns else None for turns in found]
    return {
        f"{name}\0{KIND}": pl.Series(["messages" if turns is not None else "other" for turns in found], dtype=pl.String),
        name: pl.Series(roles, dtype=pl.String),
        f"{name}\0{TURNS}": pl.Series([None if turns is None else len(turns) for turns in found], dtype=pl.Int64),
        f"{name}\0{SHORTEST}": pl.Series([min(each, default=None) for each in lengths], dtype=pl.Int64),
        f"{name}\0{LONGEST}": pl.Series([max(each, default=None) for each in lengths], dtype=pl.Int64),
    }


def turns_of(messages: Any) -> list[tuple[str, int]] | None:
    """(role, characters) of each message; None where it is no list of messages. A call of a tool may have no content."""
    if not isinstance(messages, list):
        return None
    turns = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        content = message.get("content")
        if isinstance(content, str):
            turns.append((message["role"], len(content)))
        elif content is None and message.get("tool_calls"):
            turns.append((message["role"], 1))
        else:
            return None
    return turns


class Unique:
    """Values that must not come twice, by 64-bit hashes: 16 bytes a record."""

    def __init__(self) -> None:
        self._hashes: list[NDArray[np.uint64]] = []
        self._lines: list[NDArray[np.int64]] = []

    def see(self, block: Block, name: str) -> None:
        values, kinds = column(block.rows, name)
        given = [row for row, kind in enumerate(kinds) if kind not in ("missing", "null")]
        texts = pl.Series([f"{kinds[row]} {values[row]}" for row in given], dtype=pl.String)
        self._hashes.append(texts.hash().to_numpy())
        self._lines.append(np.array(given, dtype=np.int64) + block.start)

    def doubles(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lines in rising order whose value came before, and the line where it first did."""
        hashes = np.concatenate([*self._hashes, np.zeros(0, dtype=np.uint64)])
        lines = np.concatenate([*self._lines, np.zeros(0, dtype=np.int64)])
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        heads = np.searchsorted(ordered, ordered[again], side="left")
        doubled, first = lines[order][again], lines[order][heads]
        by_line = np.argsort(doubled, kind="stable")
        return doubled[by_line], first[by_line]
