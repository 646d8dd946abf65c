"""Locate assistant turns that a chat template rewrites once others follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from recipes.records.conversation import UnfitRecord

BEFORE_MARK, OWN_MARK, PLAIN_MARK = "\u25c71\u25c7", "\u25c72\u25c7", "\u25c73\u25c7"
"""What is put behind the text of the turn before and behind that of the turn itself, and in the place of the whole turn."""

TAG_ENDS = (">", "]", "\n")
"""What templates end their constant texts with: two of those may begin alike."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` of a rendered text."""

    start: int
    end: int


class Render(Protocol):
    """What a template makes of messages; with `answer`, and of the header of what the assistant answers to them."""

    def __call__(self, messages: Sequence[Message], *, answer: bool = False) -> str: ...


def find_assistant_turn(render: Render, given: Sequence[Message], number: int, whole: str, end_token: str) -> Span | None:
    """What the assistant says in message `number` of a conversation that becomes `whole`; None where that is not sure.

    It begins behind the header that the template writes for an answer there, or behind as much of it as stands there: with
    thoughts switched off, Qwen3's writes empty ones for the answer to come, which it leaves out once others follow.

    Raises:
        UnfitRecord: a text that is needed to find it is empty, or the template refuses it.
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
    """What ends a turn, of what stands behind it where it is the `last` one and where it is `followed` by others; None where
    nothing does. Phi-3's ends a conversation with a token more.
    """
    if followed.startswith(last):
        return last
    common = last[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, followed, strict=False)))]
    return common[: max(map(common.rfind, TAG_ENDS)) + 1] or None


def add_mark(message: Message, mark: str) -> Message:
    """With a mark behind its last letter: whether a template strips white space is no matter then. Where it has no text, the
    mark stands behind the name of the last tool that it calls.
    """
    content = message.get("content") or ""
    if end := len(content.rstrip()):
        return {**message, "content": content[:end] + mark + content[end:]}
    match message.get("tool_calls"):
        case [*others, {"function": {"name": str(name)} as function} as last]:
            return {**message, "tool_calls": [*others, {**last, "function": {**function, "name": name + mark}}]}
        case [*others, {"name": str(name)} as last]:
            return {**message, "tool_calls": [*others, {**last, "name": name + mark}]}
    raise UnfitRecord("has an empty message beside one that the chat template writes in another way once others follow it")
