"""The normal form of conversations, as the serving engine passes it to a chat template."""

import json
from typing import Any

import pytest

from recipes.records.conversation import UnfitRecord, find_unread_keys, normalize_conversation, read_tools
from recipes.records.record_layouts import Layout, detect_layout
from recipes.records.record_reader import parse_record

ASKED = {"role": "user", "content": "Who?"}
ANSWERED = {"role": "assistant", "content": "She."}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", "arguments": arguments}, **more}


def normalized(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return normalize_conversation({"messages": [*messages, ANSWERED], **more}).messages[:-1]


def test_tool_is_normalized_to_engine_key_order_and_keeps_schema_order() -> None:
    schema = {"type": "object", "properties": {"where": {"type": "string"}, "day": {"enum": [None, 1]}}}
    expected = [{"type": "function", "function": {"name": "find", "description": "", "parameters": schema}}]
    forms: list[dict[str, Any]] = [
        {"function": {"parameters": schema, "strict": True, "name": "find"}, "type": "function"},
        {"function": {"parameters": json.dumps(schema), "name": "find", "description": None}},
        {"parameters": schema, "name": "find"},
    ]
    for form in forms:
        assert json.dumps(read_tools({"tools": [form]})) == json.dumps(read_tools({"tools": json.dumps([form])}))
        assert json.dumps(read_tools({"tools": [form]})) == json.dumps(expected)
    assert read_tools({"tools": [{"name": "stop", "parameters": None}]}) == [
        {"type": "function", "function": {"name": "stop", "description": "", "parameters": {}}}
    ]


def test_message_keeps_engine_keys_in_engine_order() -> None:
    given = {
        "tool_calls": [{"id": "c", "index": 0, "function": {"arguments": {"where": "Lund", "day": None}, "name": "find"}}],
        "refusal": None,
        "name": "bot",
        "reasoning_content": "Hm.",
        "content": None,
        "role": "assistant",
    }
    (found,) = normalized(given)
    assert json.dumps(found) == json.dumps(
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "name": "bot",
            "tool_calls": [call({"where": "Lund", "day": None}, id="c")],
        }
    )


@pytest.mark.parametrize("key", ["tool_calls", "name", "tool_call_id", "reasoning_content", "weight", "refusal"])
def test_a_null_key_of_a_message_is_absent(key: str) -> None:
    assert normalized(ASKED, {**ANSWERED, key: None}) == normalized(ASKED, ANSWERED)
    assert find_unread_keys({"messages": [{**ANSWERED, key: None}]}) == set()


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_empty_call_arguments_are_normalized_in_every_form(arguments: Any) -> None:
    (found,) = normalized({"role": "assistant", "content": "", "tool_calls": [call(arguments)]})
    assert found["tool_calls"] == [call({})]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({**ANSWERED, "weight": 0.5}, "'weight' of message 1 must be 0 or 1"),
        ({**ANSWERED, "weight": "1"}, "'weight' of message 1 must be 0 or 1"),
        ({**ANSWERED, "weight": True}, "'weight' of message 1 must be 0 or 1"),
        ({**ANSWERED, "tool_calls": {}}, None),
        ({**ANSWERED, "tool_calls": "find"}, "'tool_calls' of message 1 must be a list"),
        (
            {**ANSWERED, "tool_calls": [call("{'where': 1}")]},
            "'arguments' of a tool call of message 1 is a text that is not",
        ),
        ({**ANSWERED, "tool_calls": [call('{"where": NaN}')]}, "it has no NaN"),
        ({**ANSWERED, "tool_calls": [{"type": "function"}]}, "a tool call of message 1 needs the name of a function"),
        ({**ANSWERED, "tool_calls": [call({}, type="code")]}, "has a type other than 'function'"),
        ({**ASKED, "content": [{"type": "text", "text": "Who?"}]}, "message 1 has a list as its content: join the texts"),
        ({**ASKED, "name": 7}, "'name' of message 1 must be a text"),
    ],
)
def test_messages_the_engine_would_refuse_are_refused(message: dict[str, Any], reason: str | None) -> None:
    row = {"messages": [message, ANSWERED]}
    if reason is None:
        assert detect_layout(row) is Layout.MESSAGES
        return
    with pytest.raises(UnfitRecord, match=reason):
        detect_layout(row)


def test_a_turn_of_weight_zero_is_read_and_not_learned() -> None:
    first, last = {**ANSWERED, "weight": 0}, {"role": "assistant", "content": "He.", "weight": 1.0}
    found = normalize_conversation({"messages": [ASKED, first, ASKED, last]})
    assert found.learned == (False, True)
    assert found.messages[1] == ANSWERED
    assert parse_record({"messages": [ASKED, {**last, "weight": 1}, ASKED, first]}).answer == "He."
    with pytest.raises(UnfitRecord, match="every turn of the assistant has the weight 0"):
        detect_layout({"messages": [ASKED, first]})


def test_system_column_becomes_first_message_unless_one_exists() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert normalized(ASKED, system="Be brief.") == [system, ASKED]
    assert normalized(system, ASKED, system="Be long.") == [system, ASKED]
    assert normalized(ASKED, system=" ") == normalized(ASKED, system=None) == [ASKED]


def test_unread_keys_and_shortened_numbers_are_reported() -> None:
    row = {
        "messages": [
            {**ASKED, "weight": 1, "audio": "x"},
            {**ANSWERED, "refusal": "no", "tool_calls": [call('{"at": 55.70466}', index=0)]},
        ],
        "tools": [
            {"type": "function", "strict": True, "function": {"name": "find", "strict": True, "parameters": {"x": 1.5}}}
        ],
        "anything": {"else": 1},
    }
    assert find_unread_keys(row) == {
        "messages.audio",
        "messages.refusal",
        "messages.tool_calls.index",
        "messages.tool_calls: digits of numbers behind the sixth",
        "messages.weight",
        "tools.function.strict",
        "tools.strict",
    }
