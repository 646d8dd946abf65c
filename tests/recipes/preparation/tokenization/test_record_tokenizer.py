"""Record tokenization: tokens and loss mask in templates that do not mark the assistant."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from recipes.contracts.job import BadConfiguration, StoreAddress
from recipes.contracts.parameters import TokenizeParameters
from recipes.contracts.rendering import Rendering
from recipes.preparation.tokenization.frozen_tokenizer import export_tokenizer, write_tokenizer_files
from recipes.preparation.tokenization.piece_tokenizer import pack_ids
from recipes.preparation.tokenization.record_tokenizer import RecordTokenizer, Tokens
from recipes.records.record_layouts import Layout, UnfitRecord
from recipes.training.data.examples import prompt_tokens
from tests.recipes.preparation.preparation_workspace import BUCKETS
from tests.recipes.tiny_model import CHAT_TEMPLATE, SENTENCES, make_tokenizer
from tests.support.recipes.record_tokenizer import SYSTEM_WITH_THE_USER, learned, record_tokenizer

BEGIN = make_tokenizer().convert_tokens_to_ids("<|im_start|>")
SPACED = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TRIMMING = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")


def ending_with_text(folder: Path, template: str) -> RecordTokenizer:
    """Return a record tokenizer whose end token differs from the template's end of turn."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", template
    tokenizer.save_pretrained(folder / "source")
    asked = TokenizeParameters(tokenizer=(folder / "source").as_uri())
    export_tokenizer(asked, StoreAddress(root=folder.as_uri(), buckets=BUCKETS), folder, folder / "frozen")
    return RecordTokenizer(folder / "frozen", asked)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TRIMMING])
@pytest.mark.parametrize("question", ["Who keeps the lamp?", "  spaces around \n", "a <|im_end|> inside", "◆probe◆"])
def test_instruction_record_is_tokenized_like_transformers(tmp_path: Path, template: str, question: str) -> None:
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


def test_every_assistant_turn_is_learned_with_its_end_token(tmp_path: Path) -> None:
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
def test_conversation_split_at_spans_is_tokenized_like_a_rendered_one(tmp_path: Path, template: str) -> None:
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
        except UnfitRecord as refused:
            assert str(found) == str(refused)
            continue
        assert rendered == tokenizer.template.conversation(messages)
        assert isinstance(found, Tokens)
        assert found.ids == own(own.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
        slow = tokenizer._tokenize_text(*rendered)
        assert [*found.runs] == [*slow.runs]
        filled += tokenizer._split_at_spans(*rendered) is not None
    assert filled


def test_texts_and_completions_end_with_the_end_token(tmp_path: Path) -> None:
    rows = [{"text": "The lamp burns."}, {"prompt": "The lamp", "completion": " burns."}]
    text, completion = record_tokenizer(tmp_path).tokenize(rows, [Layout.TEXT, Layout.COMPLETION])
    assert learned(text) == "The lamp burns.<|im_end|>"
    assert learned(completion) == " burns.<|im_end|>"


def test_start_and_end_tokens_in_text_are_not_duplicated(tmp_path: Path) -> None:
    """Text rendered by another chat template has them already; TRL omits the end token too."""
    tokenizer = record_tokenizer(tmp_path)
    tokenizer._start_tokens = pack_ids([BEGIN])
    rows = [
        {"text": "<|im_start|>The lamp burns.<|im_end|>"},
        {"prompt": "<|im_start|>The lamp", "completion": " burns.<|im_end|>"},
        {"text": "The lamp burns."},
        {"prompt": "The lamp", "completion": " burns."},
    ]
    found = tokenizer.tokenize(rows, [Layout.TEXT, Layout.COMPLETION] * 2)
    text, completion, plain_text, plain_completion = found
    assert isinstance(text, Tokens) and isinstance(completion, Tokens)
    assert isinstance(plain_text, Tokens) and isinstance(plain_completion, Tokens)
    assert text.ids == plain_text.ids == completion.ids == plain_completion.ids
    assert completion.runs == plain_completion.runs
    assert text.runs == [0, len(text)]
    (asked,) = tokenizer.tokenize([{"instruction": "Who?", "answer": "She.<|im_end|>"}], [Layout.INSTRUCTION])
    assert learned(asked) == "She.<|im_end|>"


TURNS = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
ENDS: dict[str, tuple[str, str]] = {
    "another end": (TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "The keeper.<|im_end|>\n"),
    "an end of all": (
        TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}",
        "The keeper.<|im_end|>\n<|endoftext|>",
    ),
    "spaces": (
        "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
        "{% else %} {{ message.content }} {{ eos_token }}{% endif %}{% endfor %}",
        " The keeper. <|endoftext|>",
    ),
}
"""Endings of Gemma and the base models of Qwen and Llama; of Phi-3; of Llama 2."""


@pytest.mark.parametrize("name", ENDS)
def test_answer_ends_like_the_template_in_instructions_and_conversations(tmp_path: Path, name: str) -> None:
    """Regression: instructions learned only the end token, the same answer as messages the template's ending."""
    template, expected = ENDS[name]
    tokenizer = ending_with_text(tmp_path, template)
    row = {"instruction": "Who keeps the lamp?", "answer": "The keeper."}
    messages = [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["answer"]}]
    instruction, conversation = tokenizer.tokenize([row, {"messages": messages}], [Layout.INSTRUCTION, Layout.MESSAGES])
    assert learned(conversation) == expected
    assert learned(instruction) == expected.removesuffix("<|endoftext|>") + "<|endoftext|>"
    own = make_tokenizer()
    own.eos_token, own.chat_template = "<|endoftext|>", template
    assert isinstance(instruction, Tokens) and isinstance(conversation, Tokens)
    assert instruction.ids in (conversation.ids, [*conversation.ids, own.eos_token_id])
    prompt = own.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt_tokens(instruction) == prompt


def test_end_token_spelled_in_an_answer_does_not_end_its_turn(tmp_path: Path) -> None:
    tokenizer = ending_with_text(tmp_path, ENDS["another end"][0])
    said = "A text ends with <|endoftext|> or not."
    messages = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": said}]
    (found,) = tokenizer.tokenize([{"messages": messages}], [Layout.MESSAGES])
    assert learned(found) == f"{said}<|im_end|>\n"


def test_every_turn_is_learned_when_template_has_a_conversation_end_token(tmp_path: Path) -> None:
    """As in Phi-3. Regression: all its conversations of several turns were refused."""
    tokenizer = ending_with_text(tmp_path, ENDS["an end of all"][0])
    messages = [
        {"role": "user", "content": "Who keeps the lamp?"},
        {"role": "assistant", "content": "The keeper."},
        {"role": "user", "content": "And the book?"},
        {"role": "assistant", "content": "She does."},
    ]
    (found,) = tokenizer.tokenize([{"messages": messages}], [Layout.MESSAGES])
    assert learned(found) == "The keeper.<|im_end|>\nShe does.<|im_end|>\n<|endoftext|>"
    (found,) = tokenizer.tokenize([{"messages": [*messages, messages[0]]}], [Layout.MESSAGES])
    assert learned(found) == "The keeper.<|im_end|>\nShe does.<|im_end|>\n"


def test_completion_gets_no_extra_leading_space(tmp_path: Path) -> None:
    """Tokenizers such as Llama 2's prepend one to every text. Regression: completions began with two."""
    spaced = Tokenizer(models.BPE(unk_token="<unk>"))
    spaced.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spaced.train_from_iterator(SENTENCES, trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>"], show_progress=False))
    spaced.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast: Any = PreTrainedTokenizerFast
    own = fast(tokenizer_object=spaced, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=SPACED)
    (tmp_path / "source").mkdir()
    own.save_pretrained(tmp_path / "source")
    asked = TokenizeParameters(tokenizer=(tmp_path / "source").as_uri())
    export_tokenizer(asked, StoreAddress(root=tmp_path.as_uri(), buckets=BUCKETS), tmp_path, tmp_path / "frozen")
    rows = [{"prompt": "the lamp", "completion": " burns."}, {"prompt": "<s>the lamp ", "completion": "burns.</s>"}]
    rows.append({"instruction": "Who keeps the lamp?", "answer": "The keeper."})
    layouts = [Layout.COMPLETION, Layout.COMPLETION, Layout.INSTRUCTION]
    one, other, answer = RecordTokenizer(tmp_path / "frozen", asked).tokenize(rows, layouts)
    assert isinstance(one, Tokens) and isinstance(other, Tokens) and isinstance(answer, Tokens)
    assert one.ids == own("the lamp burns.</s>")["input_ids"]
    assert one.ids[: one.runs[0]] == own("the lamp")["input_ids"]
    assert other.ids == own("<s>the lamp burns.</s>", add_special_tokens=False)["input_ids"]
    text = "user: Who keeps the lamp?</s>assistant: The keeper.</s>"
    assert answer.ids == own(text, add_special_tokens=False)["input_ids"]
    said = "".join(own.convert_ids_to_tokens(answer.ids[answer.runs[0] :]))
    assert said.replace("\u2581", " ").strip() == "The keeper.</s>"


def test_preference_data_is_refused_with_its_reason(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (found,) = record_tokenizer(tmp_path).tokenize([row], [Layout.PREFERENCE])
    assert isinstance(found, UnfitRecord)
    assert "preference training" in str(found)


def test_template_reading_the_date_is_refused_unless_date_is_set(tmp_path: Path) -> None:
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
    cut = Tokens(pack_ids([1, 2, 3, 4]), [2, 2]).cut(length)
    assert (cut.ids, cut.runs, cut.teaches) == (ids, runs, teaches)


def test_record_of_one_token_has_nothing_to_learn() -> None:
    assert not Tokens(pack_ids([1]), [0, 1]).teaches
    assert Tokens(pack_ids([1, 2]), [0, 2]).teaches


def test_prompt_includes_input_and_system_message_of_the_record(tmp_path: Path) -> None:
    own = make_tokenizer()
    tokenizer = record_tokenizer(tmp_path, system_prompt="Be brief.")
    row = {"instruction": "Translate.", "answer": "Lampe"}
    rows = [{**row, "input": "lamp"}, {**row, "system": "Be long."}, {**row, "input": " ", "system": None}]
    for found, system, asked in zip(
        tokenizer.tokenize(rows, [Layout.INSTRUCTION] * 3),
        ("Be brief.", "Be long.", "Be brief."),
        ("Translate.\n\nlamp", "Translate.", "Translate."),
        strict=True,
    ):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
        prompt = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(found, Tokens)
        assert prompt_tokens(found) == own(prompt, add_special_tokens=False)["input_ids"]
        assert learned(found) == "Lampe<|im_end|>"


def test_a_turn_of_weight_zero_is_not_learned(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Who keeps the lamp?"},
        {"role": "assistant", "content": "He.", "weight": 0},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "The keeper.", "weight": 1},
    ]
    (found,) = record_tokenizer(tmp_path).tokenize([{"messages": messages}], [Layout.MESSAGES])
    assert learned(found) == "The keeper.<|im_end|>"
    assert isinstance(found, Tokens)
    assert make_tokenizer().decode(found.ids) == make_tokenizer().apply_chat_template(messages, tokenize=False)


def test_older_run_renders_records_as_stored(tmp_path: Path) -> None:
    """Tools keep stored keys, instructions ignore input and system prompt, every turn is learned."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + CHAT_TEMPLATE
    asked = TokenizeParameters(tokenizer="own")
    write_tokenizer_files(tokenizer, tmp_path, asked, Rendering.AS_STORED)
    answer = {"role": "assistant", "content": "Lampe", "weight": 0}
    tools = [{"function": {"name": "f"}, "type": "function"}]
    rows = [
        {"messages": [{"role": "user", "content": "lamp"}, answer, {**answer, "weight": 1}], "tools": tools},
        {"instruction": "lamp", "input": "x", "system": "y", "answer": "Lampe"},
    ]
    said, plain = RecordTokenizer(tmp_path, asked).tokenize(rows, [Layout.MESSAGES, Layout.INSTRUCTION])
    assert isinstance(said, Tokens) and isinstance(plain, Tokens)
    assert make_tokenizer().decode(said.ids).startswith('[{"function": {"name": "f"}, "type": "function"}]<|im_start|>user')
    assert learned(said) == "Lampe<|im_end|>Lampe<|im_end|>"
    assert make_tokenizer().decode(plain.ids) == "<|im_start|>user\nlamp<|im_end|>\n<|im_start|>assistant\nLampe<|im_end|>"
