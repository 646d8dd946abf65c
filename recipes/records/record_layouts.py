"""The shapes that a training record may have, and what of each is read by a model.

A record may hold more keys than its layout's: they go with it, and nothing is learned from them.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from recipes.contracts.job import BadConfiguration

ROLES = ("system", "user", "assistant", "tool")


class Layout(StrEnum):
    """Keys that make a record what it is; the names are those that the field uses."""

    INSTRUCTION = "instruction/answer"
    COMPLETION = "prompt/completion"
    MESSAGES = "messages"
    PREFERENCE = "prompt/chosen/rejected"
    TEXT = "text"


LAYOUT_KEYS: dict[Layout, tuple[str, ...]] = {
    Layout.INSTRUCTION: ("instruction", "answer"),
    Layout.MESSAGES: ("messages",),
    Layout.PREFERENCE: ("prompt", "chosen", "rejected"),
    Layout.COMPLETION: ("prompt", "completion"),
    Layout.TEXT: ("text",),
}
"""Looked for in this order: the first whose keys a record has is its layout."""
FOREIGN_KEYS_ADVICE: dict[tuple[str, ...], str] = {
    ("chosen", "rejected"): "a pair has its 'prompt' as a text beside 'chosen' and 'rejected', which are the answers alone",
    ("instruction", "output"): "rename 'output' to 'answer', and put 'input', where it has one, behind its 'instruction'",
    ("conversations",): (
        "rename 'conversations' to 'messages', of each 'from' to 'role' (human: user, gpt: assistant), 'value' to 'content'"
    ),
    ("prompt", "response"): "rename 'response' to 'completion'",
    ("question", "answer"): "rename 'question' to 'instruction'",
    ("input", "output"): "rename 'input' to 'instruction' and 'output' to 'answer'",
}
"""What to do with records as others have them, by their keys: Alpaca's and ShareGPT's first of all."""


MESSAGE_LIST_ADVICE = {
    Layout.COMPLETION: "join 'prompt' and 'completion' to one list, 'messages'",
    Layout.PREFERENCE: "a pair has texts, so write the prompt as the chat template does, and of each answer its content",
}
"""What to do with lists of messages where texts are asked for, as TRL takes both."""


class UnfitRecord(ValueError):
    """A record has no layout that a model could be trained on; the message says why."""


class UnknownLayout(UnfitRecord):
    """It has the keys of none: a row of a table, as far as anybody knows."""


def detect_layout(row: Mapping[str, Any]) -> Layout:
    """The layout of a record, whose values are checked.

    Raises:
        UnfitRecord: it has the keys of none, or a value that is not what the layout needs.
    """
    for layout, keys in LAYOUT_KEYS.items():
        if all(key in row for key in keys):
            if layout is Layout.MESSAGES:
                check_conversation(row["messages"])
                read_tools(row)
            else:
                for key in keys:
                    if isinstance(row[key], list):
                        raise UnfitRecord(f"'{key}' is a list: {MESSAGE_LIST_ADVICE.get(layout, 'make it a text')}")
                    if not isinstance(row[key], str) or not row[key].strip():
                        raise UnfitRecord(f"'{key}' must be a text that is not empty")
            return layout
    advice = next((f": {advice}" for keys, advice in FOREIGN_KEYS_ADVICE.items() if all(key in row for key in keys)), "")
    raise UnknownLayout(f"has none of {', '.join(Layout)}{advice}")


def detect_column_layout(columns: Collection[str]) -> Layout | None:
    """The layout of the records that have these columns; none where no record can have one."""
    return next((layout for layout, keys in LAYOUT_KEYS.items() if all(key in columns for key in keys)), None)


def check_conversation(messages: Any) -> None:
    """Whether `messages` is a list of known roles with texts, in which the assistant says something."""
    if not isinstance(messages, list) or not messages:
        raise UnfitRecord("'messages' must be a list that is not empty")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UnfitRecord(f"message {number} needs a role, one of {', '.join(ROLES)}")
        content = message.get("content")
        calls = message["role"] == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and calls):
            raise UnfitRecord(f"message {number} needs a content that is a text")
    if not any(message["role"] == "assistant" for message in messages):
        raise UnfitRecord("'messages' has no turn of the assistant: there is nothing to learn")


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """What the assistant of a conversation may call, as JSON schemas; none where there is nothing.

    Raises:
        UnfitRecord: they are something else.
    """
    tools = row.get("tools")
    if isinstance(tools, str):  # as tables have them, where a column has one type
        try:
            tools = json.loads(tools or "null")
        except ValueError as error:
            raise UnfitRecord(f"'tools' is a text that is not JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnfitRecord("'tools' must be a list of JSON schemas")
    return tools


def require_one_layout(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Layout]]:
    """The rows of a dataset as they come, and the one layout of them all; they are counted from line 1.

    Raises:
        BadConfiguration: a row has none, or another than those before it; the message names its line.
    """
    found: Layout | None = None
    for line, row in enumerate(rows, start=1):
        try:
            layout = detect_layout(row)
        except UnfitRecord as problem:
            raise BadConfiguration(f"line {line}: the record {problem}") from None
        if found not in (None, layout):
            raise BadConfiguration(f"line {line}: the record is {layout}, those before it are {found}")
        found = layout
        yield row, layout


def read_question(row: Mapping[str, Any], layout: Layout) -> str:
    """What a record asks: records that ask the same must not be torn apart by a split."""
    if layout is Layout.MESSAGES:
        asked = (message["content"] for message in row["messages"] if message["role"] == "user")
        return next(asked, None) or str(row["messages"][0].get("content") or "")
    return str(row[LAYOUT_KEYS[layout][0]])


def read_record_text(row: Mapping[str, Any], layout: Layout) -> str:
    """All that a model reads of a record, as one text."""
    if layout is Layout.MESSAGES:
        return "\n".join(message.get("content") or "" for message in row["messages"])
    return "\n".join(row[key] for key in LAYOUT_KEYS[layout])
