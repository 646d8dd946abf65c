"""Contracts: each violation is reported with line, column and reason; valid records pass."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from recipes.contracts.dataset_contract import ChatContract, ColumnContract, Contract
from recipes.contracts.job import BadConfiguration
from recipes.contracts.validation_results import MAX_NAMED_RECORDS, Violations
from recipes.validation.contract_check import ContractChecker
from recipes.validation.record_blocks import MAX_BLOCK_RECORDS, iterate_blocks, iterate_lines, make_block


def check(contract: Contract, rows: list[dict[str, Any]]) -> Violations:
    lines = [json.dumps(row).encode() for row in rows]
    conformance = ContractChecker(contract)
    conformance.add(make_block(1, lines, [json.loads(line) for line in lines]))
    return conformance.violations()


def reasons(rules: dict[str, Any], *values: Any) -> list[str]:
    """Return the reasons why a column's values violate its rules; `...` omits the column."""
    rows = [{} if value is ... else {"c": value} for value in values]
    found = check(Contract(columns={"c": ColumnContract(**rules)}), rows)
    return [f"{each.line} {each.reason}" for each in found.first]


@pytest.mark.parametrize(
    ("rules", "values", "expected"),
    [
        ({"type": "string"}, ["a", 1, None, ..., True], ["2", "3", "4", "5"]),
        ({"type": "string", "nullable": True}, ["a", None, ...], ["3"]),
        ({"type": "string", "required": False}, ["a", None, ...], ["2"]),
        ({"type": "integer"}, [1, 1.5, True, "1"], ["2", "3", "4"]),
        ({"type": "number"}, [1, 1.5, True], ["3"]),
        ({"type": "integer"}, [2**70], []),
        ({"type": "integer", "minimum": 0, "maximum": 5}, [2**63, 10**400, 5, 6, -(2**70)], ["1", "2", "4", "5"]),
        ({"type": "number", "minimum": 0, "maximum": 5}, [2**63, 10**400, 5, 1e308, -(10**400)], ["1", "2", "4", "5"]),
        ({"type": "boolean", "allowed": [True]}, [True, False], ["2"]),
        ({"type": "number", "minimum": 0, "maximum": 1}, [0, 1, 0.5, -0.1, 1.1], ["4", "5"]),
        ({"type": "string", "min_length": 2, "max_length": 3}, ["a", "ab", "abc", "abcd", "äöü"], ["1", "4"]),
        ({"type": "array", "min_length": 1}, [[], [1], "x"], ["1", "3"]),
        ({"type": "string", "pattern": "[a-z]+"}, ["ab", "a1", "", "a\nb"], ["2", "3", "4"]),
        ({"type": "string", "allowed": ["x", "y"]}, ["x", "z", 1], ["2", "3"]),
        ({"type": "number", "allowed": [1, 2.5]}, [1, 1.0, 2.5, 2, "1"], ["4", "5"]),
        ({"type": "integer", "unique": True}, [1, 2, 1, 1, 3], ["3", "4"]),
        ({"type": "object"}, [{}, []], ["2"]),
    ],
)
def test_each_rule_reports_the_violating_lines(rules: dict[str, Any], values: list[Any], expected: list[str]) -> None:
    assert [reason.split()[0] for reason in reasons(rules, *values)] == expected


def test_violation_reason_states_the_requirement() -> None:
    assert reasons({"type": "string", "nullable": True}, 1) == ["1 must be string or null"]
    assert reasons({"type": "number", "maximum": 5}, 7) == ["1 must be at most 5"]
    assert reasons({"type": "string", "min_length": 3}, "x") == ["1 its length must be at least 3"]
    assert reasons({"type": "string", "unique": True}, "x", "y", "x") == ["3 must be unique: line 1 has the same"]


def test_missing_column_is_distinguished_from_empty_value() -> None:
    found = check(Contract(columns={"c": ColumnContract(type="string", min_length=1)}), [{}, {"c": ""}])
    assert [each.value for each in found.first] == ["(no such column)", ""]


def test_closed_contract_reports_unknown_columns() -> None:
    found = check(Contract(columns={"a": ColumnContract(type="string")}, closed=True), [{"a": "x"}, {"a": "x", "b": 1}])
    assert [(each.line, each.column, each.value) for each in found.first] == [(2, "b", "1")]


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "text"} for role in roles]}


@pytest.mark.parametrize(
    ("order", "roles", "fits"),
    [
        ("system? (user assistant)+", ("user", "assistant"), True),
        ("system? (user assistant)+", ("system", "user", "assistant", "user", "assistant"), True),
        ("system? (user assistant)+", ("user", "user", "assistant"), False),
        ("system? (user assistant)+", ("user",), False),
        ("system? (user assistant)+", ("superuser", "assistant"), False),
        ("(user (assistant tool)* assistant)+", ("user", "assistant", "tool", "assistant"), True),
        ("(user (assistant tool)* assistant)+", ("user", "tool", "assistant"), False),
        ("system (user|assistant)+", ("system", "assistant"), True),
    ],
)
def test_conversation_role_order_is_checked(order: str, roles: tuple[str, ...], fits: bool) -> None:
    assert (check(Contract(conversation=ChatContract(order=order)), [turns(*roles)]).count == 0) is fits


def test_invalid_overlong_and_incomplete_conversations_are_reported() -> None:
    contract = Contract(conversation=ChatContract(required=("system",), max_turns=3, max_length=5))
    rows = [
        {"messages": "hello"},
        {},
        {"messages": [{"role": "user"}]},
        turns("user", "assistant"),
        turns("system", "user", "assistant", "user", "assistant"),
        {"messages": [*turns("system", "user")["messages"], {"role": "assistant", "content": "a long answer"}]},
    ]
    found = [(each.line, each.reason) for each in check(contract, rows).first]
    assert [line for line, _ in found] == [1, 2, 3, 4, 5, 6]
    assert found[0][1] == "must be a list of messages with role and content"
    assert found[3][1] == "must have a message of the system"
    assert found[4][1] == "its messages must be at most 3"
    assert found[5][1] == "each message's length must be at most 5"


def test_tool_call_may_have_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    rows = [{"messages": [{"role": "user", "content": "x"}, call]}]
    assert check(Contract(conversation=ChatContract()), rows).count == 0


def test_all_violations_are_counted_and_the_first_few_named_across_files(tmp_path: Path) -> None:
    count = MAX_BLOCK_RECORDS + 500
    for name, half in (("a.jsonl", range(count // 2)), ("b.jsonl", range(count // 2, count))):
        (tmp_path / name).write_text("".join(json.dumps({"n": number}) + "\n" for number in half))
    conformance = ContractChecker(Contract(columns={"n": ColumnContract(type="integer", maximum=99, unique=True)}))
    for each in iterate_blocks(iterate_lines(sorted(tmp_path.glob("*.jsonl")))):
        conformance.add(each)
    found = conformance.violations()
    assert found.count == found.records == count - 100
    assert [each.line for each in found.first] == list(range(101, 101 + MAX_NAMED_RECORDS))


def test_uniqueness_is_checked_across_blocks(tmp_path: Path) -> None:
    numbers = [*range(MAX_BLOCK_RECORDS), 5]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": number}) + "\n" for number in numbers))
    conformance = ContractChecker(Contract(columns={"n": ColumnContract(type="integer", unique=True)}))
    for each in iterate_blocks(iterate_lines([tmp_path / "a.jsonl"])):
        conformance.add(each)
    (violation,) = conformance.violations().first
    assert (violation.line, violation.reason) == (MAX_BLOCK_RECORDS + 1, "must be unique: line 6 has the same")


@given(
    st.lists(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()))
)
@settings(max_examples=40, deadline=None)
def test_each_record_is_judged_by_its_own_value_in_mixed_columns(values: list[Any]) -> None:
    found = reasons({"type": "string", "max_length": 3}, *values)
    wrong = [line for line, value in enumerate(values, start=1) if not isinstance(value, str) or len(value) > 3]
    assert [int(reason.split()[0]) for reason in found] == wrong[:MAX_NAMED_RECORDS]


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (
            {"type": "number", "minimum": 2, "maximum": 1},
            "it is less than minimum, which is 2.0: no record could satisfy both",
        ),
        ({"type": "array", "min_length": 3, "max_length": 2}, "it is less than min_length, which is 3"),
        ({"type": "string", "minimum": 1}, "'minimum' is a rule for integer and number, not for string"),
        ({"type": "string", "pattern": "("}, "not a regular expression"),
        ({"type": "text"}, "string"),
        ({"type": "integer", "allowed": [1, "2"]}, "'allowed' has '2', which is not of type integer"),
        ({"type": "boolean", "allowed": [1]}, "'allowed' has 1, which is not of type boolean"),
    ],
)
def test_unsatisfiable_column_rule_is_refused_on_parsing(rules: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ColumnContract(**rules)


@pytest.mark.parametrize("pattern", ["(?=x)x", r"(a)\1", r"x\Z"])
def test_unsupported_pattern_is_refused_naming_its_column(pattern: str) -> None:
    with pytest.raises(BadConfiguration, match=r"contract\.columns\.c\.pattern: .* is not supported: write it without"):
        reasons({"type": "string", "pattern": pattern}, "x")


@pytest.mark.parametrize(
    "rules", [{"min_turns": 3, "max_turns": 2}, {"min_length": 8, "max_length": 7}, {"max_turns": 1, "min_turns": 2}]
)
def test_unsatisfiable_conversation_rule_is_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="no record could satisfy both"):
        ChatContract(**rules)  # type: ignore[arg-type]
    lowest = {name.replace("max", "min"): value for name, value in rules.items() if name.startswith("max")}
    assert ChatContract(**{**rules, **lowest}).model_fields_set == rules.keys()  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["user (assistant", "user; assistant", "+"])
def test_invalid_role_order_is_refused(order: str) -> None:
    with pytest.raises(ValidationError):
        ChatContract(order=order)


def test_columns_with_arbitrary_names_are_distinguished() -> None:
    names = ["type", "length", "a b", "ä", "", random.Random(1).randbytes(4).hex()]
    contract = Contract(columns={name: ColumnContract(type="string", max_length=2) for name in names})
    found = check(contract, [dict.fromkeys(names, "long")])
    assert sorted(each.column for each in found.first) == sorted(names)
