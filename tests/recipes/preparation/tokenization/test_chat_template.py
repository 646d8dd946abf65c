"""Several chat templates of one tokenizer, including one for tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import BadConfiguration
from recipes.preparation.read_stage import digest_record
from recipes.preparation.tokenization.record_tokenizer import Tokens
from recipes.records.record_layouts import Layout, UnfitRecord
from recipes.records.record_reader import parse_record
from recipes.training.data.examples import prompt_tokens, tokenize_records
from tests.recipes.preparation.preparation_workspace import Place, questions
from tests.recipes.tiny_model import CHAT_TEMPLATE, make_tokenizer
from tests.support.recipes.record_tokenizer import learned, record_tokenizer

WITH_TOOLS = "{% if tools %}You may call: {{ tools | tojson }}<|im_end|>\n{% endif %}" + CHAT_TEMPLATE
PLAIN = CHAT_TEMPLATE.replace("<|im_start|>", "<|im_start|>the ")
SEVERAL = {"default": PLAIN, "tool_use": WITH_TOOLS}
MESSAGES = [{"role": "user", "content": "Who keeps the lamp?"}, {"role": "assistant", "content": "The keeper."}]
COUNT = {"name": "count", "description": "Ships.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": COUNT}]
QUESTION = {"instruction": "Who?", "answer": "She."}


@pytest.mark.parametrize("template", [WITH_TOOLS, SEVERAL, {"default": WITH_TOOLS}])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [], "", "null", None])
def test_conversation_with_tools_is_tokenized_like_transformers(tmp_path: Path, template: Any, tools: Any) -> None:
    own = make_tokenizer()
    own.chat_template = template
    given = json.loads(tools or "null") if isinstance(tools, str) else tools
    whole = own.apply_chat_template(MESSAGES, tools=given or None, tokenize=False)
    assert ("You may call" in whole) == bool(given)
    (found,) = record_tokenizer(tmp_path, template).tokenize([{"messages": MESSAGES, "tools": tools}], [Layout.MESSAGES])
    assert isinstance(found, Tokens)
    assert found.ids == own(whole, add_special_tokens=False)["input_ids"]
    assert learned(found) == "The keeper.<|im_end|>"


def test_raw_record_training_and_evaluation_include_tools() -> None:
    own = make_tokenizer()
    own.chat_template = SEVERAL
    (found,) = tokenize_records(own, [parse_record({"messages": MESSAGES, "tools": TOOLS})], None)
    assert isinstance(found, Tokens)
    prompt = own.apply_chat_template(MESSAGES[:1], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert "You may call" in prompt
    assert prompt_tokens(found) == own(prompt, add_special_tokens=False)["input_ids"]


def test_record_digest_depends_on_tools() -> None:
    def known_by(**more: Any) -> str:
        return digest_record({"messages": MESSAGES, **more}, Layout.MESSAGES).hex()

    assert known_by() == "0c9235042321da61abfe7c17816c4ada", "as before there were tools: it decides an order"
    assert known_by() == known_by(tools=[]) == known_by(tools=None) == known_by(class_="often")
    assert known_by(tools=TOOLS) == known_by(tools=json.dumps(TOOLS))
    assert len({known_by(), known_by(tools=TOOLS), known_by(tools=TOOLS * 2)}) == 3


def test_default_template_is_used_without_tools(tmp_path: Path) -> None:
    rows = [QUESTION, {"messages": MESSAGES}]
    layouts = [Layout.INSTRUCTION, Layout.MESSAGES]
    several = record_tokenizer(tmp_path / "several", SEVERAL).tokenize(rows, layouts)
    assert several == record_tokenizer(tmp_path / "one", PLAIN).tokenize(rows, layouts)


def test_multiple_templates_without_a_default_are_refused_when_one_is_needed(tmp_path: Path) -> None:
    tokenizer = record_tokenizer(tmp_path, {"rag": CHAT_TEMPLATE, "tool_use": WITH_TOOLS})
    (text,) = tokenizer.tokenize([{"text": "The lamp burns."}], [Layout.TEXT])
    (called,) = tokenizer.tokenize([{"messages": MESSAGES, "tools": TOOLS}], [Layout.MESSAGES])
    assert not isinstance(text, UnfitRecord) and not isinstance(called, UnfitRecord)
    with pytest.raises(
        BadConfiguration, match=r"several chat templates \(rag, tool_use\), and none is called 'default': set"
    ):
        tokenizer.tokenize([QUESTION], [Layout.INSTRUCTION])


def test_tools_made_invalid_json_by_masking_are_rejected(tmp_path: Path) -> None:
    """A private key without its end is masked to the text's end, with brackets."""
    kept, spoilt = (
        [{"name": "sign", "description": text}] for text in ("as a@example.com", "-----BEGIN PRIVATE KEY----- x")
    )
    rows = [*questions(40), *({"messages": MESSAGES, "tools": json.dumps(tools)} for tools in (kept, spoilt))]
    place = Place(tmp_path, rows)
    result = place.prepare({"tokenize": place.tokenize()})
    (found,) = place.rows(result, "rejected")
    assert (found["line"], found["reason"]) == (42, "no layout")
    assert "'tools' is a text that is not JSON" in found["detail"]
    (written,) = (row for row in place.rows(result) if "tools" in row)
    assert json.loads(written["tools"])[0]["description"] == "as [REDACTED]"
