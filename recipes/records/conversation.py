"""Conversations in the normal form of the serving engine, so that a model learns what it will be shown.

llama.cpp reads messages and tools into its own types and writes them out again for the chat template: keys that it does not
know are gone, those that it knows have one order, and a tool has a name, a description and parameters. Inside `parameters`
and `arguments` the order and the nulls are the author's.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool", "developer")
"""The engine renders `developer` as `system`, unless the template knows the difference."""
SYSTEM_ROLES = ("system", "developer")
TEXT_KEYS = ("reasoning_content", "name", "tool_call_id")
"""What a message may hold beside its content, in the engine's order. Tool calls come last."""
PLAIN_KEYS = {"role", "content"}
MESSAGE_KEYS = {*PLAIN_KEYS, *TEXT_KEYS, "tool_calls"}
CALL_KEYS, FUNCTION_CALL_KEYS = {"type", "function", "id"}, {"name", "arguments"}
FLAT_CALL_KEYS = {*FUNCTION_CALL_KEYS, "type", "id"}
TOOL_KEYS, FUNCTION_KEYS = {"type", "function"}, {"name", "description", "parameters"}
FLAT_TOOL_KEYS = {*FUNCTION_KEYS, "type"}
ORDERED_KEYS = ("arguments", "parameters")
"""Objects in which the order of keys is the author's, and decides what a model reads."""


INT64 = 1 << 63
LONG_NUMBER = re.compile(r"\d[\d.]{6}")
LONG_NUMBERS = "digits of numbers behind the sixth"
"""What the engine's templates drop of the numbers in tools and arguments."""


class UnfitRecord(ValueError):
    """A record has no layout that a model could be trained on; the message says why."""


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in the engine's normal form; `learned` says of each assistant message whether it is trained on.

    The `arguments` of a call are as they were given, an object or a JSON text: which of both a template is handed depends on
    the template.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    learned: tuple[bool, ...]


def normalize_conversation(row: Mapping[str, Any]) -> Conversation:
    """The conversation of a record with the key `messages`.

    Raises:
        UnfitRecord: it is none that the engine could be sent, or there is nothing to learn in it.
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
        raise UnfitRecord(f"a tool call of message {number} is of another type than 'function'")
    if not isinstance(identifier := call.get("id"), str | None):
        raise UnfitRecord(f"the 'id' of a tool call of message {number} must be a text")
    arguments = function.get("arguments")
    arguments = {} if arguments is None or arguments == "" else arguments
    if isinstance(arguments, str):
        parse_json(arguments, f"the 'arguments' of a tool call of message {number}")
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**found, "id": identifier} if identifier else found


def read_weight(message: Message, number: int) -> bool:
    """Whether an assistant message is learned: OpenAI's `weight`, which is 1 where it is not given."""
    weight = message.get("weight")
    if weight is None:
        return True
    # A column of Parquet that lacks some values has its integers as doubles.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
        raise UnfitRecord(f"the 'weight' of message {number} must be 0 or 1")
    return weight == 1


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """What the assistant of a conversation may call, in the engine's normal form; none where there is nothing.

    Raises:
        UnfitRecord: they are something else.
    """
    tools = row.get("tools")
    if isinstance(tools, str):  # as tables have them, where a column has one type
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
        raise UnfitRecord(f"tool {number} is of another type than 'function', which the engine does not know")
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
    """A text that a record may have beside its layout's; None where it has none, or says nothing.

    Raises:
        UnfitRecord: it is no text.
    """
    value = row.get(key)
    if not isinstance(value, str | None):
        raise UnfitRecord(f"'{key}' must be a text, or be left out")
    return value if value and not value.isspace() else None


def parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UnfitRecord(f"{what} is a text that is not JSON: {error}") from None


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it has no {name}")


def parse_arguments(arguments: Any) -> Any:
    """The arguments of a normalized call as a value."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


# What of a record the engine would not pass on to a template.


def find_unread_keys(row: Mapping[str, Any]) -> set[str]:
    """Keys inside messages and tools that no template is shown, as `messages.refusal`. Null means that there is none."""
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
    """Of a tool or a call, which both may have their function's keys in themselves."""
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
    """A value that may be given as a JSON text; a text without long numbers is not worth parsing."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if LONG_NUMBER.search(value) else None
    except (ValueError, RecursionError):
        return None


def has_long_number(value: Any) -> bool:
    """Whether a JSON value has a number that the engine's templates do not write in full: they keep six digits."""
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
    """One line: which keys, and in how many records."""
    return ", ".join(f"{key} (in {count})" for key, count in sorted(counts.items()))


# Where the order of keys is the author's: what canonical storage keeps.


def find_ordered_objects(row: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Of the calls and tools of a record each object that holds one whose order counts, with its key."""
    messages, tools = row.get("messages"), row.get("tools")
    holders = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(calls := message.get("tool_calls"), list):
            holders += [call for call in calls if isinstance(call, dict)]
    for holder in holders:
        function = holder.get("function")
        for each in (holder, function) if isinstance(function, dict) else (holder,):
            yield from ((each, key) for key in ORDERED_KEYS if isinstance(each.get(key), dict | list))
