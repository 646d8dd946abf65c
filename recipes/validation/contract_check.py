"""Check records against their contract with pandera."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandera.polars as pa
import polars as pl
from numpy.typing import NDArray
from pandera.errors import SchemaErrors

from recipes.contracts.dataset_contract import ChatContract, ColumnContract, Contract, compile_order
from recipes.contracts.job import BadConfiguration
from recipes.contracts.validation_results import MAX_NAMED_RECORDS, Violation, Violations
from recipes.validation.record_blocks import RecordBlock, read_column, to_double

MAX_VALUE_CHARACTERS = 80
TYPE_SUFFIX, LENGTH_SUFFIX, TURNS_SUFFIX, SHORTEST_SUFFIX, LONGEST_SUFFIX = (
    "type",
    "length",
    "turns",
    "shortest message",
    "longest message",
)
INT64_RANGE = range(-(2**63), 2**63)


class ContractChecker:
    """Collects the violations of a contract over blocks of records."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._schema = build_schema(contract)
        self._by_reason: Counter[str] = Counter()
        self._first: list[Violation] = []
        self._records = 0
        self._unique = {name: UniqueValues() for name, rules in contract.columns.items() if rules.unique}

    def add(self, block: RecordBlock) -> None:
        broken = [*find_failures(self._schema, build_frame(self._contract, block)), *self._find_unknown_columns(block)]
        rows = sorted({row for row, _, _ in broken})
        self._records += len(rows)
        self._by_reason.update(f"{name}: {reason}" for _, name, reason in broken)
        for row, name, reason in sorted(broken)[: max(0, MAX_NAMED_RECORDS - len(self._first))]:
            value = block.rows[row].get(name, "(no such column)")
            self._first.append(
                Violation(line=block.start + row, column=name, reason=reason, value=f"{value}"[:MAX_VALUE_CHARACTERS])
            )
        for name, unique in self._unique.items():
            unique.add(block, name)

    def violations(self) -> Violations:
        first, records, by_reason = self._first, self._records, Counter(self._by_reason)
        for name, unique in self._unique.items():
            lines, heads = unique.find_duplicates()
            records += len(lines)
            if len(lines):
                by_reason[f"{name}: must be unique"] = len(lines)
            pairs = zip(lines[:MAX_NAMED_RECORDS].tolist(), heads[:MAX_NAMED_RECORDS].tolist(), strict=True)
            reasons = ((line, f"must be unique: line {head} has the same") for line, head in pairs)
            first = [*first, *(Violation(line=line, column=name, reason=reason) for line, reason in reasons)]
        return Violations(
            count=by_reason.total(),
            records=records,
            by_reason=dict(by_reason.most_common(MAX_NAMED_RECORDS)),
            first=tuple(sorted(first, key=lambda violation: violation.line)[:MAX_NAMED_RECORDS]),
        )

    def _find_unknown_columns(self, block: RecordBlock) -> Iterator[tuple[int, str, str]]:
        if self._contract.closed:
            known = {*self._contract.columns, *([chat.column] if (chat := self._contract.conversation) else [])}
            for row, record in enumerate(block.rows):
                for name in record.keys() - known:
                    yield row, name, "is not a column of the contract"


def find_failures(schema: pa.DataFrameSchema, frame: pl.DataFrame) -> list[tuple[int, str, str]]:
    """Return row, column and reason of each failure."""
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as errors:
        cases = errors.failure_cases.select("index", "column", "check").rows()
        return [(int(row), name.partition("\0")[0], reason) for row, name, reason in cases]
    return []


def build_schema(contract: Contract) -> pa.DataFrameSchema:
    """Translate the contract to pandera: for each column its values, and separately types and lengths.

    A polars column has one type, while a column of JSON lines may have several: JSON types are a separate column.
    """
    columns: dict[str, pa.Column] = {}
    for name, rules in contract.columns.items():
        columns |= make_column_checks(name, rules)
    if contract.conversation is not None:
        columns |= make_conversation_checks(contract.conversation)
    return pa.DataFrameSchema(columns)


def make_column_checks(name: str, rules: ColumnContract) -> dict[str, pa.Column]:
    kinds = {rules.type, "integer"} if rules.type == "number" else {rules.type}
    kinds |= {"null"} if rules.nullable else set()
    kinds |= set() if rules.required else {"missing"}
    wanted = " or ".join([rules.type, *(["null"] if rules.nullable else [])])
    checks = {f"{name}\0{TYPE_SUFFIX}": pa.Column(pl.String, membership_check(sorted(kinds), f"must be {wanted}"))}
    bounds = range_checks(rules.minimum, rules.maximum, "must be")
    if rules.allowed is not None:
        allowed = [VALUE_CONVERTERS[rules.type](value) for value in rules.allowed]
        bounds.append(membership_check(allowed, f"must be one of {', '.join(map(str, rules.allowed))}"))
    if rules.pattern is not None:
        bounds.append(pattern_check(name, rules.pattern))
    if bounds:
        checks[name] = pa.Column(POLARS_TYPES[rules.type], bounds, nullable=True)
    if lengths := range_checks(rules.min_length, rules.max_length, "its length must be"):
        checks[f"{name}\0{LENGTH_SUFFIX}"] = pa.Column(pl.Int64, lengths, nullable=True)
    return checks


def make_conversation_checks(chat: ChatContract) -> dict[str, pa.Column]:
    name = chat.column
    order = pa.Check.str_matches(f"^{compile_order(chat.order)}$", error=f"the order of roles must be {chat.order}")
    has = [pa.Check.str_contains(f"{role} ", error=f"must have a message of the {role}") for role in chat.required]
    checks = {
        f"{name}\0{TYPE_SUFFIX}": pa.Column(
            pl.String, membership_check(["messages"], "must be a list of messages with role and content")
        ),
        name: pa.Column(pl.String, [order, *has], nullable=True),
        f"{name}\0{TURNS_SUFFIX}": pa.Column(
            pl.Int64, range_checks(chat.min_turns, chat.max_turns, "its messages must be"), nullable=True
        ),
    }
    if shortest := range_checks(chat.min_length, None, "each message's length must be"):
        checks[f"{name}\0{SHORTEST_SUFFIX}"] = pa.Column(pl.Int64, shortest, nullable=True)
    if longest := range_checks(None, chat.max_length, "each message's length must be"):
        checks[f"{name}\0{LONGEST_SUFFIX}"] = pa.Column(pl.Int64, longest, nullable=True)
    return checks


def membership_check(values: Sequence[Any], error: str) -> pa.Check:
    return pa.Check.isin(values, error=error)


def pattern_check(name: str, pattern: str) -> pa.Check:
    """Create a check of a pattern.

    Raises BadConfiguration if Python supports the pattern, but polars does not.
    """
    whole = rf"^(?:{pattern})$"
    try:
        pl.Series([""]).str.contains(whole)
    except pl.exceptions.ComputeError:
        raise BadConfiguration(
            f"contract.columns.{name}.pattern: {pattern} is not supported: write it without look-around, backreferences "
            r"and \Z"
        ) from None
    return pa.Check.str_matches(whole, error=f"must match {pattern}")


def range_checks(least: float | None, most: float | None, what: str) -> list[pa.Check]:
    checks = [] if least is None else [pa.Check.ge(least, error=f"{what} at least {least:g}")]
    return checks if most is None else [*checks, pa.Check.le(most, error=f"{what} at most {most:g}")]


POLARS_TYPES: dict[str, Any] = {"string": pl.String, "integer": pl.Int64, "number": pl.Float64, "boolean": pl.Boolean}
VALUE_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "string": lambda value: value if type(value) is str else None,
    "integer": lambda value: min(max(value, INT64_RANGE[0]), INT64_RANGE[-1]) if type(value) is int else None,
    "number": lambda value: to_double(value) if type(value) in (int, float) else None,
    "boolean": lambda value: value if type(value) is bool else None,
}
"""Convert a value for polars, clipping numbers to its range; None for values of another type."""


def build_frame(contract: Contract, block: RecordBlock) -> pl.DataFrame:
    """Build the columns of `build_schema` for a block.

    Values of other types than the contract's are null.
    """
    checks: dict[str, pl.Series] = {}
    for name, rules in contract.columns.items():
        values, kinds = read_column(block.rows, name)
        checks[f"{name}\0{TYPE_SUFFIX}"] = pl.Series(kinds, dtype=pl.String)
        if rules.type in VALUE_CONVERTERS:
            checks[name] = pl.Series(map(VALUE_CONVERTERS[rules.type], values), dtype=POLARS_TYPES[rules.type])
        if rules.type in ("string", "array"):
            fitting = zip(values, kinds, strict=True)
            sizes = [len(value) if kind == rules.type else None for value, kind in fitting]
            checks[f"{name}\0{LENGTH_SUFFIX}"] = pl.Series(sizes, dtype=pl.Int64)
    if contract.conversation is not None:
        checks |= make_conversation_columns(contract.conversation.column, block)
    return pl.DataFrame(checks)


def make_conversation_columns(name: str, block: RecordBlock) -> dict[str, pl.Series]:
    """Build the columns of a conversation.

    Validity, roles in order, number of turns, shortest and longest content.
    """
    found = [read_turns(row.get(name)) for row in block.rows]
    lengths = [[length for _, length in turns or ()] for turns in found]
    roles = ["".join(f"{role} " for role, _ in turns) if turns else None for turns in found]
    return {
        f"{name}\0{TYPE_SUFFIX}": pl.Series(
            ["messages" if turns is not None else "other" for turns in found], dtype=pl.String
        ),
        name: pl.Series(roles, dtype=pl.String),
        f"{name}\0{TURNS_SUFFIX}": pl.Series([None if turns is None else len(turns) for turns in found], dtype=pl.Int64),
        f"{name}\0{SHORTEST_SUFFIX}": pl.Series([min(each, default=None) for each in lengths], dtype=pl.Int64),
        f"{name}\0{LONGEST_SUFFIX}": pl.Series([max(each, default=None) for each in lengths], dtype=pl.Int64),
    }


def read_turns(messages: Any) -> list[tuple[str, int]] | None:
    """Return role and length of each message; None for an invalid list.

    Tool calls may have no content.
    """
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


class UniqueValues:
    """Detects duplicate values by 64-bit hashes: 16 bytes per record."""

    def __init__(self) -> None:
        self._hashes: list[NDArray[np.uint64]] = []
        self._lines: list[NDArray[np.int64]] = []

    def add(self, block: RecordBlock, name: str) -> None:
        values, kinds = read_column(block.rows, name)
        given = [row for row, kind in enumerate(kinds) if kind not in ("missing", "null")]
        texts = pl.Series([f"{kinds[row]} {values[row]}" for row in given], dtype=pl.String)
        self._hashes.append(texts.hash().to_numpy())
        self._lines.append(np.array(given, dtype=np.int64) + block.start)

    def find_duplicates(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sorted lines of repeated values, and the line of each value's first occurrence."""
        hashes = np.concatenate([*self._hashes, np.zeros(0, dtype=np.uint64)])
        lines = np.concatenate([*self._lines, np.zeros(0, dtype=np.int64)])
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        heads = np.searchsorted(ordered, ordered[again], side="left")
        doubled, first = lines[order][again], lines[order][heads]
        by_line = np.argsort(doubled, kind="stable")
        return doubled[by_line], first[by_line]
