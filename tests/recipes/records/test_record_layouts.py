"""Detection of a record's layout, and the message for a record without one."""

from typing import Any

import pytest

from recipes.contracts.job import BadConfiguration
from recipes.records.record_layouts import (
    Layout,
    UnfitRecord,
    detect_layout,
    read_question,
    read_record_text,
    require_one_layout,
)

ASKED = {"role": "user", "content": "Who?"}
ANSWERED = {"role": "assistant", "content": "She."}


@pytest.mark.parametrize(
    ("row", "layout", "asked", "text"),
    [
        ({"instruction": "Who?", "answer": "She.", "key": 1}, Layout.INSTRUCTION, "Who?", "Who?\nShe."),
        (
            {"instruction": "Who?", "input": "Her?", "answer": "She."},
            Layout.INSTRUCTION,
            "Who?\n\nHer?",
            "Who?\n\nHer?\nShe.",
        ),
        ({"prompt": "Who?", "completion": "She."}, Layout.COMPLETION, "Who?", "Who?\nShe."),
        ({"prompt": "Who?", "chosen": "She.", "rejected": "He."}, Layout.PREFERENCE, "Who?", "Who?\nShe.\nHe."),
        ({"messages": [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED]}, Layout.MESSAGES, "Who?", None),
        ({"text": "She keeps it."}, Layout.TEXT, "She keeps it.", "She keeps it."),
    ],
)
def test_layout_is_detected_by_record_keys(row: dict[str, Any], layout: Layout, asked: str, text: str | None) -> None:
    assert detect_layout(row) is layout
    assert read_question(row, layout) == asked
    assert read_record_text(row, layout) == (text or "Be brief.\nWho?\nShe.")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"foo": 1}, "has none of instruction/answer, prompt/completion, messages"),
        ({"instruction": "a", "input": "b", "output": "c"}, "text: rename 'output' to 'answer', and keep 'input'"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "'from' to 'role' .human: user, gpt: assistant."),
        ({"conversations": [], "chosen": {}, "rejected": {}}, "a pair needs 'prompt' as a text, and only the answers"),
        ({"question": "a", "answer": "b"}, "rename 'question' to 'instruction'"),
        (
            {"prompt": [ASKED], "completion": [ANSWERED]},
            "'prompt' is a list: concatenate 'prompt' and 'completion' into one list",
        ),
        ({"prompt": "a", "chosen": [ANSWERED], "rejected": "b"}, "'chosen' is a list: a pair needs texts: render"),
        ({"text": ["a"]}, "'text' is a list: make it a text"),
        ({"instruction": "", "answer": "x"}, "'instruction' must be a text that is not empty"),
        ({"instruction": "a", "input": 5, "answer": "b"}, "'input' must be a text, or be removed"),
        ({"text": 5}, "'text' must be a text that is not empty"),
        ({"messages": []}, "'messages' must be a list that is not empty"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "message 1 needs a role, one of system, user, assistant, tool"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "message 2 needs a content that is a text"),
        ({"messages": [ASKED]}, "'messages' has no turn of the assistant"),
        ({"messages": [ASKED, ANSWERED], "tools": "hammer"}, "'tools' is a text that is not JSON: "),
        ({"messages": [ASKED, ANSWERED], "tools": ["hammer"]}, "'tools' must be a list of JSON schemas"),
        ({"messages": [ASKED, ANSWERED], "tools": '{"name": "hammer"}'}, "'tools' must be a list of JSON schemas"),
    ],
)
def test_record_without_a_layout_is_refused_with_the_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnfitRecord, match=reason):
        detect_layout(row)


def test_mixed_layouts_are_refused_with_the_line() -> None:
    good = {"instruction": "Who?", "answer": "She."}
    assert list(require_one_layout([good, good])) == [(good, Layout.INSTRUCTION)] * 2
    with pytest.raises(BadConfiguration, match="line 2: the record has none of"):
        list(require_one_layout([good, {"foo": 1}]))
    with pytest.raises(BadConfiguration, match="line 3: the record is text, those before it are instruction/answer"):
        list(require_one_layout([good, good, {"text": "x"}]))
