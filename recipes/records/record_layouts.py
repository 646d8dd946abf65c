"""Layouts of training records, and which parts of each a model reads.

A record may have keys outside its layout, which are stored but not learned from. Of the keys that commonly accompany an
instruction, `input` and the message `system` are read.
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
    """A record's layout by its keys; values are the field's names."""

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
"""Checked in this order: the first layout whose keys are all present applies."""
OPTIONAL_KEYS: dict[Layout, tuple[str, ...]] = {
    Layout.INSTRUCTION: ("system", "input"),
    Layout.MESSAGES: ("system", "tools"),
}
"""Optional keys of a layout that a model reads."""
KEY_COLUMN = "key"
"""Key of the word by which an answer is scored."""
FOREIGN_KEYS_ADVICE: dict[tuple[str, ...], str] = {
    ("chosen", "rejected"): "a pair needs 'prompt' as a text, and only the answers in 'chosen' and 'rejected'",
    ("instruction", "output"): "rename 'output' to 'answer', and keep 'input', if it exists, as it is",
    ("conversations",): (
        "rename 'conversations' to 'messages'; in each, 'from' to 'role' (human: user, gpt: assistant), 'value' to 'content'"
    ),
    ("prompt", "response"): "rename 'response' to 'completion'",
    ("question", "answer"): "rename 'question' to 'instruction'",
    ("input", "output"): "rename 'input' to 'instruction' and 'output' to 'answer'",
}
"""How to convert records of other formats, by their keys, such as Alpaca's and ShareGPT's."""


MESSAGE_LIST_ADVICE = {
    Layout.COMPLETION: "concatenate 'prompt' and 'completion' into one list, 'messages'",
    Layout.PREFERENCE: "a pair needs texts: render the prompt with the chat template, and keep each answer's content",
}
"""How to convert lists of messages where texts are needed; TRL accepts both."""


class UnknownLayout(UnfitRecord):
    """The record has the keys of no layout.

    It may be a row of a table.
    """


def detect_layout(row: Mapping[str, Any]) -> Layout:
    """Detect and validate the layout of a record.

    Raises:
        UnfitRecord: it has the keys of no layout, or an invalid value.
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
    """Return the layout of records with these columns, or None if there is none."""
    return next((layout for layout, keys in LAYOUT_KEYS.items() if all(key in columns for key in keys)), None)


def has_asked_context(columns: Collection[str]) -> bool:
    """Return whether instructions with these columns may have additional context."""
    has_instructions = detect_column_layout(columns) is Layout.INSTRUCTION
    return has_instructions and any(key in columns for key in OPTIONAL_KEYS[Layout.INSTRUCTION])


def depends_on_rendering(columns: Collection[str]) -> bool:
    """Return whether renderings (`recipes.contracts.rendering`) may differ for records with these columns."""
    return detect_column_layout(columns) is Layout.MESSAGES or has_asked_context(columns)


def read_text_columns(columns: Collection[str]) -> set[str]:
    """Return the columns of a table that hold text in its records' layout."""
    layout = detect_column_layout(columns)
    if layout is None:
        return set()
    return {*LAYOUT_KEYS[layout], *OPTIONAL_KEYS.get(layout, ()), KEY_COLUMN}.intersection(columns)


def read_instruction(row: Mapping[str, Any]) -> str:
    """Return an instruction with its input after a blank line, as in Alpaca."""
    given = read_optional_text(row, "input")
    return str(row["instruction"]) if given is None else f"{row['instruction']}\n\n{given}"


def instruction_messages(row: Mapping[str, Any]) -> list[Message]:
    """Convert an instruction to a conversation."""
    system = read_optional_text(row, "system")
    before: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    asked: Message = {"role": "user", "content": read_instruction(row)}
    return [*before, asked, {"role": "assistant", "content": row["answer"]}]


def find_unread(row: Mapping[str, Any], layout: Layout | None) -> set[str]:
    """Return parts of a record that look relevant, but that no model reads."""
    if layout not in (Layout.COMPLETION, Layout.PREFERENCE, Layout.MESSAGES):
        return set()
    found = find_unread_keys(row) if layout is Layout.MESSAGES else set()
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        # Plain texts are read without a system message, and a conversation may have its own.
        first = normalize_conversation(row).messages[0] if layout is Layout.MESSAGES else None
        if first is None or first["content"] != system:
            found.add("system")
    return found


def require_one_layout(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Layout]]:
    """Yield rows with their layout, which must be the same for all.

    Errors count lines from 1.

    Raises:
        BadConfiguration: a row has no layout, or a different one; the message has its line.
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
    """Return the question of a record.

    Records with equal questions must be in the same split.
    """
    if layout is Layout.MESSAGES:
        asked = (message["content"] for message in row["messages"] if message["role"] == "user")
        return next(asked, None) or str(row["messages"][0].get("content") or "")
    if layout is Layout.INSTRUCTION:
        return "\n".join(message["content"] for message in instruction_messages(row)[:-1])
    return str(row[LAYOUT_KEYS[layout][0]])


def read_record_text(row: Mapping[str, Any], layout: Layout) -> str:
    """Return all text of a record that a model reads."""
    if layout is Layout.MESSAGES:
        return "\n".join(message.get("content") or "" for message in row["messages"])
    if layout is Layout.INSTRUCTION:
        return "\n".join(message["content"] for message in instruction_messages(row))
    return "\n".join(row[key] for key in LAYOUT_KEYS[layout])
