"""Normalize conversations as the serving engine does.

Training and serving then see the same text. llama.cpp parses messages and tools into its own types and serializes them for
the chat template: unknown keys are dropped, known ones have a fixed order, and a tool has a name, a description and
parameters. Inside `parameters` and `arguments` the author's order of keys and nulls are kept.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool", "developer")
"""The engine renders `developer` as `system`, unless the template handles it."""
SYSTEM_ROLES = ("system", "developer")
TEXT_KEYS = ("reasoning_content", "name", "tool_call_id")
"""Optional keys of a message in addition to its content, in the engine's order. Tool calls come last."""
PLAIN_KEYS = {"role", "content"}
MESSAGE_KEYS = {*PLAIN_KEYS, *TEXT_KEYS, "tool_calls"}
CALL_KEYS, FUNCTION_CALL_KEYS = {"type", "function", "id"}, {"name", "arguments"}
FLAT_CALL_KEYS = {*FUNCTION_CALL_KEYS, "type", "id"}
TOOL_KEYS, FUNCTION_KEYS = {"type", "function"}, {"name", "description", "parameters"}
FLAT_TOOL_KEYS = {*FUNCTION_KEYS, "type"}
ORDERED_KEYS = ("arguments", "parameters")
"""Objects that keep the author's order of keys, which affects what a model reads."""


INT64 = 1 << 63
LONG_NUMBER = re.compile(r"\d[\d.]{6}")
LONG_NUMBERS = "digits of numbers behind the sixth"
"""Description of what the engine's templates drop from numbers in tools and arguments."""


class UnfitRecord(ValueError):
    """A record has no trainable layout; the message explains why."""


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in the engine's normal form.

    `learned` flags the assistant messages to train on. The `arguments` of a call stay as given, an object or JSON text: the
    template decides which of them it receives.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    learned: tuple[bool, ...]


def normalize_conversation(row: Mapping[str, Any]) -> Conversation:
    """Normalize the conversation of a record with the key `messages`.

    Raises:
        UnfitRecord: the engine would reject it, or there is nothing to learn in it.
    """
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise UnfitRecord("'messages' must be a list that is not empty")
    found = [normalize_message(message, number) for number, message in enumerate(messages, start=1)]
    learned = tuple(
        [read_weight(message, number) for number, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    )
    if not learned:
        raise UnfitRecord("'messages' has no turn of the assistant: there is nothing to learn")
    if not any(learned):
        raise UnfitRecord("every turn of the assistant has the weight 0: there is nothing to learn")
    system = row.get("system")
    if isinstance(system, str) and system.strip() and found[0]["role"] not in SYSTEM_ROLES:
        found.insert(0, {"role": "system", "content": system})
    return Conversation(found, read_tools(row), learned)


def normalize_message(message: Any, number: int) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise UnfitRecord(f"message {number} needs a role, one of {', '.join(ROLES)}")
    content = message.get("content")
    if message.keys() == PLAIN_KEYS and isinstance(content, str):
        return {"role": message["role"], "content": content}
    calls = message.get("tool_calls") or None
    if isinstance(content, list):
        raise UnfitRecord(f"message {number} has a list as its content: join the texts of its parts, with newlines between")
    if not isinstance(content, str) and not (content is None and calls and message["role"] == "assistant"):
        raise UnfitRecord(f"message {number} needs a content that is a text")
    found: Message = {"role": message["role"], "content": content or ""}
    for key in TEXT_KEYS:
        value = message.get(key)
        if not isinstance(value, str | None):
            raise UnfitRecord(f"'{key}' of message {number} must be a text")
        if value:
            found[key] = value
    if calls is not None:
        if not isinstance(calls, list):
            raise UnfitRecord(f"'tool_calls' of message {number} must be a list")
        found["tool_calls"] = [normalize_call(call, number) for call in calls]
    return found


def normalize_call(call: Any, number: int) -> dict[str, Any]:
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnfitRecord(f"a tool call of message {number} needs the name of a function")
    if call.get("type") not in (None, "function"):
        raise UnfitRecord(f"a tool call of message {number} has a type other than 'function'")
    if not isinstance(identifier := call.get("id"), str | None):
        raise UnfitRecord(f"the 'id' of a tool call of message {number} must be a text")
    arguments = function.get("arguments")
    arguments = {} if arguments is None or arguments == "" else arguments
    if isinstance(arguments, str):
        parse_json(arguments, f"the 'arguments' of a tool call of message {number}")
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**found, "id": identifier} if identifier else found


def read_weight(message: Message, number: int) -> bool:
    """Return whether an assistant message is learned: OpenAI's `weight`, 1 by default."""
    weight = message.get("weight")
    if weight is None:
        return True
    # In Parquet a nullable integer column may be stored as doubles.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
        raise UnfitRecord(f"the 'weight' of message {number} must be 0 or 1")
    return weight == 1


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return a conversation's tools in the engine's normal form, or None.

    Raises:
        UnfitRecord: `tools` is no list of tools.
    """
    tools = row.get("tools")
    if isinstance(tools, str):  # in tables, where a column has a single type
        tools = parse_json(tools or "null", "'tools'")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnfitRecord("'tools' must be a list of JSON schemas")
    return [normalize_tool(tool, number) for number, tool in enumerate(tools, start=1)]


def normalize_tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    function = tool.get("function")
    function = tool if function is None else function
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnfitRecord(f"tool {number} needs the name of a function")
    if tool.get("type") not in (None, "function"):
        raise UnfitRecord(f"tool {number} has a type other than 'function', which the engine does not support")
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None):
        raise UnfitRecord(f"the 'description' of tool {number} must be a text")
    if isinstance(parameters, str):
        parameters = parse_json(parameters or "null", f"the 'parameters' of tool {number}")
    if not isinstance(parameters, dict | None):
        raise UnfitRecord(f"the 'parameters' of tool {number} must be a JSON schema")
    return {
        "type": "function",
        "function": {"name": function["name"], "description": description or "", "parameters": parameters or {}},
    }


def read_optional_text(row: Mapping[str, Any], key: str) -> str | None:
    """Return an optional text of a record, or None if it is missing or blank.

    Raises:
        UnfitRecord: it is not a text.
    """
    value = row.get(key)
    if not isinstance(value, str | None):
        raise UnfitRecord(f"'{key}' must be a text, or be removed")
    return value if value and not value.isspace() else None


def parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UnfitRecord(f"{what} is a text that is not JSON: {error}") from None


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it has no {name}")


def parse_arguments(arguments: Any) -> Any:
    """Return the arguments of a normalized call as a value."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


# Parts of a record that the engine does not pass to a template.


def find_unread_keys(row: Mapping[str, Any]) -> set[str]:
    """Return keys in messages and tools that templates do not receive, such as `messages.refusal`.

    Null values are ignored.
    """
    found: set[str] = set()
    messages, tools = row.get("messages"), row.get("tools")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.keys() != PLAIN_KEYS:
            known = {*MESSAGE_KEYS, "weight"} if message.get("role") == "assistant" else MESSAGE_KEYS
            add_unread(found, "messages", message, known)
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                add_unread_function(found, "messages.tool_calls", call, (CALL_KEYS, FUNCTION_CALL_KEYS, FLAT_CALL_KEYS))
    if isinstance(messages, list):
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError):
                tools = None
        for tool in tools if isinstance(tools, list) else ():
            add_unread_function(found, "tools", tool, (TOOL_KEYS, FUNCTION_KEYS, FLAT_TOOL_KEYS))
    return found


def add_unread_function(found: set[str], place: str, value: Any, known: tuple[set[str], set[str], set[str]]) -> None:
    """Check a tool or call, whose function's keys may be nested or inline."""
    outer, inner, flat = known
    if isinstance(value, dict):
        function = value.get("function")
        add_unread(found, place, value, flat if function is None else outer)
        if isinstance(function, dict):
            add_unread(found, f"{place}.function", function, inner)
        read = function if isinstance(function, dict) else value
        for key in ORDERED_KEYS:
            if key in inner and has_long_number(parse_if_long(read.get(key))):
                found.add(f"{place}: {LONG_NUMBERS}")


def parse_if_long(value: Any) -> Any:
    """Parse a value that may be JSON text, if it contains a long number."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if LONG_NUMBER.search(value) else None
    except (ValueError, RecursionError):
        return None


def has_long_number(value: Any) -> bool:
    """Return whether a number in a JSON value has more than the engine's six digits."""
    if isinstance(value, dict):
        return any(map(has_long_number, value.values()))
    if isinstance(value, list):
        return any(map(has_long_number, value))
    if isinstance(value, float):
        return float(f"{value:g}") != value
    return isinstance(value, int) and not -INT64 <= value < INT64


def add_unread(found: set[str], place: str, value: Mapping[str, Any], known: set[str]) -> None:
    found.update(f"{place}.{key}" for key, held in value.items() if key not in known and held is not None)


def describe_unread(counts: Mapping[str, int]) -> str:
    """Format keys and their numbers of records in one line."""
    return ", ".join(f"{key} (in {count})" for key, count in sorted(counts.items()))


# Objects whose order of keys is the author's, which canonical storage keeps.


def find_ordered_objects(row: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the holders of ordered objects in a record's calls and tools, with the key."""
    messages, tools = row.get("messages"), row.get("tools")
    holders = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(calls := message.get("tool_calls"), list):
            holders += [call for call in calls if isinstance(call, dict)]
    for holder in holders:
        function = holder.get("function")
        for each in (holder, function) if isinstance(function, dict) else (holder,):
            yield from ((each, key) for key in ORDERED_KEYS if isinstance(each.get(key), dict | list))
