"""Assistant spans in templates that render a turn differently once others follow."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.preparation.tokenization.chat_template import ChatTemplate
from recipes.preparation.tokenization.record_tokenizer import Tokens
from recipes.preparation.tokenization.rewritten_turns import BEFORE_MARK, OWN_MARK
from recipes.records.record_layouts import Layout, UnfitRecord
from tests.recipes.tiny_model import CHAT_TEMPLATE, make_tokenizer
from tests.support.recipes.record_tokenizer import learned, record_tokenizer

THOUGHTFUL = r"""
{%- set ns = namespace(asked=0) -%}
{%- for message in messages if message.role == 'user' -%}{%- set ns.asked = messages.index(message) -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' -%}{%- generation -%}
{%- set said, thought = message.content or '', message.reasoning_content or '' -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.asked and (loop.last or thought) -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
{{- said -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n' if said or not loop.first -}}{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}{{- '\n' -}}
{%- else -%}{{- message.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""
"""Like Qwen3's template: thoughts only in answers to the last question, empty ones in the last answer.

Unlike most templates it marks the assistant's part.
"""
THOUGHTLESS = {"enable_thinking": False}
EMPTY = "<think>\n\n</think>\n\n"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *called: str, **more: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": {"at": "night"}}} for name in called]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **more}


def answered(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


LAMP = [user("Who keeps the lamp?"), assistant("The keeper.")]
CONVERSATIONS = [
    [*LAMP, user("And the book?"), assistant("She does.")],
    [
        {"role": "system", "content": "Be brief."},
        *LAMP,
        user("And?"),
        assistant("1 < 2 \n"),
        user("Why?"),
        assistant("Ships."),
    ],
    [*LAMP, user("Go on!"), assistant("The lamp."), assistant("And the ships.")],
    [
        user("Who?"),
        assistant("<think>\nOne.\n</think>\n\nShe."),
        user("Who?"),
        assistant("<think>\nShe.\n</think>\n\nI."),
    ],
    [user("How many?"), assistant(None, "count"), answered("1947"), assistant("1947 ships.")],
    [user("How many?"), assistant("", "look", "count"), answered("many"), answered("7"), assistant("7, I think.")],
    [
        user("How many?"),
        assistant("I look.", "count"),
        answered(" 7 "),
        assistant(None, "count"),
        answered("8"),
        assistant("8."),
    ],
    [user("How many?"), assistant(None, "count", reasoning_content="I count."), answered("1947"), assistant("1947 ships.")],
    [user("How many?"), assistant(None, "count"), answered("3"), assistant("3.", reasoning_content="3 it is."), *LAMP],
    [*LAMP, user("x"), *LAMP, user("How many?"), assistant(None, "count"), answered("3")],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_learned_tokens_equal_assistant_mask_of_transformers(tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    own = make_tokenizer()
    own.chat_template = THOUGHTFUL
    marked = own.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    tokenizer = record_tokenizer(tmp_path, THOUGHTFUL)
    (found,) = tokenizer.tokenize([{"messages": messages}], [Layout.MESSAGES])
    assert isinstance(found, Tokens), found
    assert found.ids == marked["input_ids"]
    mask = [number % 2 for number, run in enumerate(found.runs) for _ in range(run)]
    assert mask == marked["assistant_masks"]
    assert tokenizer.template.conversation(messages) == tokenizer.template._read(messages)


def test_only_the_last_answer_is_learned_with_its_template_thoughts(tmp_path: Path) -> None:
    (found,) = record_tokenizer(tmp_path, THOUGHTFUL).tokenize([{"messages": CONVERSATIONS[0]}], [Layout.MESSAGES])
    assert learned(found) == f"The keeper.<|im_end|>{EMPTY}She does.<|im_end|>"


@pytest.mark.parametrize("messages", CONVERSATIONS[:3])
def test_thoughts_that_template_adds_to_every_answer_are_not_learned(tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    """With thinking disabled, the template itself writes the empty thoughts before an answer."""
    tokenizer = record_tokenizer(tmp_path, THOUGHTFUL, template_arguments=THOUGHTLESS)
    whole, spans = tokenizer.template.conversation(messages)
    said = [whole[span.start : span.end] for span in spans]
    assert said == [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
    assert EMPTY in whole
    assert tokenizer.template._read(messages) == (whole, spans)


def test_turn_ends_at_template_end_marker_instead_of_end_token() -> None:
    """As in Qwen3's base models, where a text's end token differs from a turn's."""
    template = ChatTemplate(THOUGHTFUL, {"eos_token": "<|endoftext|>"}, {}, None, "<|endoftext|>")
    whole, spans = template.conversation(CONVERSATIONS[0])
    assert [whole[span.start : span.end] for span in spans] == ["The keeper.<|im_end|>\n", f"{EMPTY}She does.<|im_end|>\n"]


COUNTING = CHAT_TEMPLATE.replace("message['content']", "message['content'] if loop.last else message['content'] | length")
TWICE = CHAT_TEMPLATE.replace("message['content']", "message['content'] if loop.last else message['content'] * 2")
RENAMING = CHAT_TEMPLATE.replace("message['role']", "message['role'] + ('' if loop.last else '!')")


@pytest.mark.parametrize("template", [COUNTING, TWICE, RENAMING])
def test_conversation_with_ambiguous_assistant_spans_is_refused(tmp_path: Path, template: str) -> None:
    (found,) = record_tokenizer(tmp_path, template).tokenize([{"messages": CONVERSATIONS[0]}], [Layout.MESSAGES])
    assert isinstance(found, UnfitRecord)
    assert "message 2 is rendered differently by the chat template when others follow it" in str(found)


@pytest.mark.parametrize("question", ["Who?", "Who sees?"])
def test_conversation_whose_rendering_depends_on_marks_is_refused(tmp_path: Path, question: str) -> None:
    """The template prints the question's length, and a mark gives the longer question another digit."""
    counted = THOUGHTFUL.replace("message.content + '<", "message.content ~ message.content | length ~ '<")
    messages = [user(question), assistant("The keeper."), user("And?"), assistant("She does.")]
    tokenizer = record_tokenizer(tmp_path, counted)
    assert f"{question}{len(question)}<|im_end|>" in tokenizer.template._render(messages)
    (found,) = tokenizer.tokenize([{"messages": messages}], [Layout.MESSAGES])
    assert isinstance(found, UnfitRecord)


@pytest.mark.parametrize(("word", "mark"), [("lamp", BEFORE_MARK), ("keeper", OWN_MARK)])
def test_text_containing_the_span_mark_is_refused(tmp_path: Path, word: str, mark: str) -> None:
    messages = json.loads(json.dumps(CONVERSATIONS[0]).replace(word, json.dumps(mark)[1:-1]))
    assert any(mark in message["content"] for message in messages)
    (found,) = record_tokenizer(tmp_path, THOUGHTFUL).tokenize([{"messages": messages}], [Layout.MESSAGES])
    # Plain texts need no marks, because their shape is known; texts that a template could inspect do.
    messages[-1]["content"] += " <"
    (marked,) = record_tokenizer(tmp_path / "marked", THOUGHTFUL).tokenize([{"messages": messages}], [Layout.MESSAGES])
    assert learned(found).startswith(messages[1]["content"] + "<|im_end|>")
    assert isinstance(marked, UnfitRecord)
