"""Locate assistant turns that a chat template renders differently once others follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from recipes.records.conversation import UnfitRecord

BEFORE_MARK, OWN_MARK, PLAIN_MARK = "\u25c71\u25c7", "\u25c72\u25c7", "\u25c73\u25c7"
"""Markers after the previous turn's text, after the turn's own text, and in place of the whole turn."""

TAG_ENDS = (">", "]", "\n")
"""Ends of templates' constants; two constants may share a prefix."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` (exclusive) of a rendered text."""

    start: int
    end: int


class Render(Protocol):
    """Renders messages with a template; with `answer`, followed by the header of the assistant's answer."""

    def __call__(self, messages: Sequence[Message], *, answer: bool = False) -> str: ...


def find_assistant_turn(render: Render, given: Sequence[Message], number: int, whole: str, end_token: str) -> Span | None:
    """Return the span of the assistant's turn `number` in the rendered conversation `whole`.

    None if it is uncertain. It starts after the header that the template writes for an answer, or after the part of it that
    is present: with thinking disabled, Qwen3's template writes an empty thinking block before an answer, and omits it once
    other turns follow.

    Raises:
        UnfitRecord: a text that is needed for the search is empty, or the template rejects it.
    """
    marked_messages = [*given]
    marked_messages[number] = add_mark(given[number], OWN_MARK)
    if number:
        marked_messages[number - 1] = add_mark(given[number - 1], BEFORE_MARK)
    text = render(marked_messages)
    if (text.count(BEFORE_MARK), text.count(OWN_MARK)) != (bool(number), 1):
        return None
    head, _, rest = text.rpartition(BEFORE_MARK)
    said, _, behind = rest.partition(OWN_MARK)
    place = len(head + said)
    tail = find_turn_end(render(marked_messages[: number + 1]).rpartition(OWN_MARK)[2], whole[place:])
    if head + said + behind != whole or tail is None:
        return None
    header = render(marked_messages[:number], answer=True).rpartition(BEFORE_MARK)[2]
    if not said.startswith(header):
        others = [*marked_messages[:number], {"role": "assistant", "content": PLAIN_MARK}, *marked_messages[number + 1 :]]
        written = render(others).rpartition(BEFORE_MARK)[2].partition(PLAIN_MARK)[0]
        if not (header.startswith(written) and said.startswith(written)):
            return None
        header = written
    end = tail.rfind(end_token)
    return Span(len(head + header), place + (len(tail) if end < 0 else end + len(end_token)))


def find_turn_end(last: str, followed: str) -> str | None:
    """Return the text that ends a turn, or None.

    It is common to the text after the turn as the `last` one, and after it when `followed` by others.

    Phi-3's template ends a conversation with an additional token.
    """
    if followed.startswith(last):
        return last
    common = last[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, followed, strict=False)))]
    return common[: max(map(common.rfind, TAG_ENDS)) + 1] or None


def add_mark(message: Message, mark: str) -> Message:
    """Add a mark after a message's last letter, so that stripping whitespace does not matter.

    In a message without text, the mark follows the name of the last tool call.
    """
    content = message.get("content") or ""
    if end := len(content.rstrip()):
        return {**message, "content": content[:end] + mark + content[end:]}
    match message.get("tool_calls"):
        case [*others, {"function": {"name": str(name)} as function} as last]:
            return {**message, "tool_calls": [*others, {**last, "function": {**function, "name": name + mark}}]}
        case [*others, {"name": str(name)} as last]:
            return {**message, "tool_calls": [*others, {**last, "name": name + mark}]}
    raise UnfitRecord("has an empty message next to one that the chat template renders differently once others follow")
