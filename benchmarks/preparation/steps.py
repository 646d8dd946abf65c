"""Steps shared by all ways except tokenization: our patterns and language model."""

import hashlib
from collections import Counter
from functools import cache
from typing import Any

from recipes.preparation.personal_data import mask_value
from recipes.preparation.text_filters import LanguageFilter

Row = dict[str, Any]


@cache
def english() -> LanguageFilter:
    """Load once per process: `datasets` pickles what it maps, and the model cannot be pickled."""
    return LanguageFilter(["en"], 0.5)


def messages_of(row: Row) -> list[dict[str, str]]:
    """Return a record as a conversation, the input of chat templates."""
    if "messages" in row:
        return [{"role": message["role"], "content": message["content"]} for message in row["messages"]]
    return [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["answer"]}]


def text_of(row: Row) -> str:
    return "\n".join(message["content"] for message in messages_of(row))


def mask_row(row: Row) -> Row:
    """Return a record without personal data."""
    if "messages" in row:
        return {
            "messages": [{**message, "content": mask_value(message["content"], Counter())} for message in row["messages"]]
        }
    return {name: mask_value(row[name], Counter()) for name in ("instruction", "answer")}


def is_english(row: Row) -> bool:
    return english().problem(text_of(row)) is None


def digest(row: Row) -> bytes:
    return hashlib.blake2b(text_of(row).encode(), digest_size=16).digest()
