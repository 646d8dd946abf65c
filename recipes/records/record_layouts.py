"""The shapes that a training record may have, and what of each is read by a model.

A record may hold more keys than its layout's: they go with it, and nothing is learned from them. Those that people write
beside an instruction are read: its `input` and the `system` message.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from recipes.contracts.job import BadConfiguration
from recipes.records.conversation import (
    Message,
    find_unread_keys,
    normalize_conversation,
    read_optional_text,
)
from recipes.records.conversation import UnfitRecord as UnfitRecord


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
OPTIONAL_KEYS: dict[Layout, tuple[str, ...]] = {
    Layout.INSTRUCTION: ("system", "input"),
    Layout.MESSAGES: ("system", "tools"),
}
"""What else is read of a record of a layout."""
KEY_COLUMN = "key"
"""Names the word by which an answer is judged."""
FOREIGN_KEYS_ADVICE: dict[tuple[str, ...], str] = {
    ("chosen", "rejected"): "a pair has its 'prompt' as a text beside 'chosen' and 'rejected', which are the answers alone",
    ("instruction", "output"): "rename 'output' to 'answer', and put 'input', where it has one, beside them as it is",
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
                normalize_conversation(row)
            else:
                for key in OPTIONAL_KEYS.get(layout, ()):
                    read_optional_text(row, key)
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


def has_asked_context(columns: Collection[str]) -> bool:
    """Whether records with these columns may ask more than their instruction says."""
    has_instructions = detect_column_layout(columns) is Layout.INSTRUCTION
    return has_instructions and any(key in columns for key in OPTIONAL_KEYS[Layout.INSTRUCTION])


def depends_on_rendering(columns: Collection[str]) -> bool:
    """Whether the ways to render a record (`recipes.contracts.rendering`) may differ for records with these columns."""
    return detect_column_layout(columns) is Layout.MESSAGES or has_asked_context(columns)


def read_text_columns(columns: Collection[str]) -> set[str]:
    """Of the columns of a table those that hold texts, whatever their cells look like: what its records' layout reads."""
    layout = detect_column_layout(columns)
    if layout is None:
        return set()
    return {*LAYOUT_KEYS[layout], *OPTIONAL_KEYS.get(layout, ()), KEY_COLUMN}.intersection(columns)


def read_instruction(row: Mapping[str, Any]) -> str:
    """What a record of an instruction asks: with its input behind a blank line, as Alpaca's are read."""
    given = read_optional_text(row, "input")
    return str(row["instruction"]) if given is None else f"{row['instruction']}\n\n{given}"


def instruction_messages(row: Mapping[str, Any]) -> list[Message]:
    """A record of an instruction as a conversation."""
    system = read_optional_text(row, "system")
    before: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    asked: Message = {"role": "user", "content": read_instruction(row)}
    return [*before, asked, {"role": "assistant", "content": row["answer"]}]


def find_unread(row: Mapping[str, Any], layout: Layout | None) -> set[str]:
    """What of a record reads like a part of it, and no model is shown."""
    if layout not in (Layout.COMPLETION, Layout.PREFERENCE, Layout.MESSAGES):
        return set()
    found = find_unread_keys(row) if layout is Layout.MESSAGES else set()
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        # Texts are read as they are, without a message before them, and a conversation may have its own.
        first = normalize_conversation(row).messages[0] if layout is Layout.MESSAGES else None
        if first is None or first["content"] != system:
            found.add("system")
    return found


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
    if layout is Layout.INSTRUCTION:
        return "\n".join(message["content"] for message in instruction_messages(row)[:-1])
    return str(row[LAYOUT_KEYS[layout][0]])


def read_record_text(row: Mapping[str, Any], layout: Layout) -> str:
    """All that a model reads of a record, as one text."""
    if layout is Layout.MESSAGES:
        return "\n".join(message.get("content") or "" for message in row["messages"])
    if layout is Layout.INSTRUCTION:
        return "\n".join(message["content"] for message in instruction_messages(row))
    return "\n".join(row[key] for key in LAYOUT_KEYS[layout])
