"""A tokenizer of records, and the text that its mask covers."""

from pathlib import Path
from typing import Any

from recipes.contracts.job import StoreAddress
from recipes.contracts.parameters import TokenizeParameters
from recipes.preparation.tokenization.frozen_tokenizer import export_tokenizer
from recipes.preparation.tokenization.record_tokenizer import RecordTokenizer, Tokens
from recipes.records.record_layouts import UnfitRecord
from tests.recipes.preparation.preparation_workspace import BUCKETS
from tests.recipes.tiny_model import CHAT_TEMPLATE, make_tokenizer


def record_tokenizer(folder: Path, template: str | dict[str, str] = CHAT_TEMPLATE, **parameters: Any) -> RecordTokenizer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "source")
    asked = TokenizeParameters(tokenizer=(folder / "source").as_uri(), **parameters)
    export_tokenizer(asked, StoreAddress(root=folder.as_uri(), buckets=BUCKETS), folder, folder / "frozen")
    return RecordTokenizer(folder / "frozen", asked)


def learned(tokens: Tokens | UnfitRecord) -> str:
    """Return the text that the mask covers."""
    assert isinstance(tokens, Tokens)
    mask = [number % 2 == 1 for number, run in enumerate(tokens.runs) for _ in range(run)]
    assert len(mask) == len(tokens.ids)
    text: str = make_tokenizer().decode([token for token, taught in zip(tokens.ids, mask, strict=True) if taught])
    return text


SYSTEM_WITH_THE_USER = """{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content + '\n\n' -%}
{%- set messages = messages[1:] -%}{%- else -%}{%- set system = '' -%}{%- endif -%}
{%- for message in messages -%}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if message.role == 'user' -%}[INST] {{ system if loop.first }}{{ message.content }} [/INST]
{%- else %} {{ message.content | trim }}<|im_end|>{%- endif -%}{%- endfor -%}"""
