"""Tokens and their mask: what the assistant said, found in templates that do not mark it."""

import random
from pathlib import Path
from typing import Any

import pytest

from recipes.layouts import Layout, Unfit
from recipes.parameters import TokenizeParameters
from recipes.preparation.pieces import packed
from recipes.preparation.tokenizer import freeze
from recipes.preparation.tokens import RecordTokenizer, Tokens
from recipes.schema import BadConfiguration, StoreAddress
from tests.recipes.preparation.place import BUCKETS
from tests.recipes.tiny_model import CHAT_TEMPLATE, make_tokenizer

TRIMMING = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")


def record_tokenizer(folder: Path, template: str | dict[str, str] = CHAT_TEMPLATE, **parameters: Any) -> RecordTokenizer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "source")
    asked = TokenizeParameters(tokenizer=(folder / "source").as_uri(), **parameters)
    freeze(asked, StoreAddress(root=folder.as_uri(), buckets=BUCKETS), folder, folder / "frozen")
    return RecordTokenizer(folder / "frozen", asked)


def learned(tokens: Tokens | Unfit) -> str:
    """What the mask covers, as text."""
    assert isinstance(tokens, Tokens)
    mask = [number % 2 == 1 for number, run in enumerate(tokens.runs) for _ in range(run)]
    assert len(mask) == len(tokens.ids)
    text: str = make_tokenizer().decode([token for token, taught in zip(tokens.ids, mask, strict=True) if taught])
    return text


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TRIMMING])
@pytest.mark.parametrize("question", ["Who keeps the lamp?", "  spaces around \n", "a <|im_end|> inside", "◆probe◆"])
def test_a_question_becomes_what_the_library_makes_of_it_with_its_answer(
    tmp_path: Path, template: str, question: str
) -> None:
    own = make_tokenizer()
    own.chat_template = template
    (found,) = record_tokenizer(tmp_path, template, system_prompt="Be brief.").tokenize(
        [{"instruction": question, "answer": "The keeper."}], [Layout.INSTRUCTION]
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    text = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = own(text, add_special_tokens=False)["input_ids"]
    answer = [*own("The keeper.", add_special_tokens=False)["input_ids"], own.eos_token_id]
    assert isinstance(found, Tokens)
    assert found.ids == prompt + answer
    assert found.runs == [len(prompt), len(answer)]


def test_of_a_conversation_every_turn_of_the_assistant_is_learned_with_its_end(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who keeps the lamp?"},
        {"role": "assistant", "content": "The keeper."},
        {"role": "user", "content": "And the book?"},
        {"role": "assistant", "content": "She does."},
    ]
    (found,) = record_tokenizer(tmp_path).tokenize([{"messages": messages}], [Layout.MESSAGES])
    whole = make_tokenizer().apply_chat_template(messages, tokenize=False)
    assert isinstance(found, Tokens)
    assert make_tokenizer().decode(found.ids) == whole
    assert learned(found) == "The keeper.<|im_end|>She does.<|im_end|>"


THINKING = """{%- for message in messages -%}
{%- if message.role == 'assistant' and loop.last -%}
<|im_start|>assistant\n<think>\n\n</think>\n\n{{ message.content }}<|im_end|>
{%- else -%}<|im_start|>{{ message.role }}\n{{ message.content.split('</think>')[-1] }}<|im_end|>\n{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"""
SYSTEM_WITH_THE_USER = """{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content + '\n\n' -%}
{%- set messages = messages[1:] -%}{%- else -%}{%- set system = '' -%}{%- endif -%}
{%- for message in messages -%}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if message.role == 'user' -%}[INST] {{ system if loop.first }}{{ message.content }} [/INST]
{%- else %} {{ message.content | trim }}<|im_end|>{%- endif -%}{%- endfor -%}"""
LOOKING = """{%- for message in messages -%}<|im_start|>{{ message.role }}{{ ' quietly' if '/no_think' in message.content }}
{{ message.content | lower if message.content.startswith('Shout') else message.content }}<|im_end|>\n{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"""
CUTTING = CHAT_TEMPLATE.replace("message['content']", "message['content'][:1000]")
SAID = [
    "The keeper.",
    "  spaces \n",
    "a <|im_end|> inside",
    "e\u0301 \U0001f600!",
    "be /no_think",
    "Shout it",
    "two\n\nlines",
    "'s 1",
    "long " * 300 + "one",
]
ORDERS = ["ua", "sua", "uaua", "suaua", "uau", "ussa", "a"]
ROLES = {"s": "system", "u": "user", "a": "assistant"}


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TRIMMING, THINKING, SYSTEM_WITH_THE_USER, LOOKING, CUTTING])
def test_a_conversation_that_is_filled_in_becomes_what_a_rendered_one_does(tmp_path: Path, template: str) -> None:
    tokenizer = record_tokenizer(tmp_path, template)
    own = make_tokenizer()
    own.chat_template = template
    draw = random.Random(1)
    filled = 0
    for order in ORDERS * 20:
        messages = [{"role": ROLES[letter], "content": draw.choice(SAID)} for letter in order]
        (found,) = tokenizer.tokenize([{"messages": messages}], [Layout.MESSAGES])
        try:
            rendered = tokenizer.template._read(messages)
        except Unfit as refused:
            assert str(found) == str(refused)
            continue
        assert rendered == tokenizer.template.conversation(messages)
        assert isinstance(found, Tokens)
        assert found.ids == own(own.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
        slow = tokenizer._conversation(*rendered)
        assert [*found.runs] == [*slow.runs]
        filled += tokenizer._parted(*rendered) is not None
    assert filled


def test_texts_and_completions_end_with_the_end_token(tmp_path: Path) -> None:
    rows = [{"text": "The lamp burns."}, {"prompt": "The lamp", "completion": " burns."}]
    text, completion = record_tokenizer(tmp_path).tokenize(rows, [Layout.TEXT, Layout.COMPLETION])
    assert learned(text) == "The lamp burns.<|im_end|>"
    assert learned(completion) == " burns.<|im_end|>"


def test_preference_data_is_refused_with_its_reason(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (found,) = record_tokenizer(tmp_path).tokenize([row], [Layout.PREFERENCE])
    assert isinstance(found, Unfit)
    assert "preference training" in str(found)


def test_a_template_that_writes_the_day_is_refused_unless_the_day_is_given(tmp_path: Path) -> None:
    dated = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
    row = {"instruction": "Who?", "answer": "She."}
    with pytest.raises(BadConfiguration, match=r"template_arguments\.date_string"):
        record_tokenizer(tmp_path / "now", dated + CHAT_TEMPLATE).tokenize([row], [Layout.INSTRUCTION])
    given = record_tokenizer(tmp_path / "then", dated + CHAT_TEMPLATE, template_arguments={"date_string": "1 Jan 2020"})
    assert isinstance(given.tokenize([row], [Layout.INSTRUCTION])[0], Tokens)


@pytest.mark.parametrize(
    ("length", "ids", "runs", "teaches"),
    [
        (9, [1, 2, 3, 4], [2, 2], True),
        (3, [1, 2, 3], [2, 1], True),
        (2, [1, 2], [2, 0], False),
    ],
)
def test_a_cut_record_keeps_its_mask(length: int, ids: list[int], runs: list[int], teaches: bool) -> None:
    cut = Tokens(packed([1, 2, 3, 4]), [2, 2]).cut(length)
    assert (cut.ids, cut.runs, cut.teaches) == (ids, runs, teaches)


def test_the_first_token_teaches_nothing() -> None:
    assert not Tokens(packed([1]), [0, 1]).teaches
    assert Tokens(packed([1, 2]), [0, 2]).teaches
