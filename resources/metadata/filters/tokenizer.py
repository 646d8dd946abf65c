"""Split MLflow's filter language into tokens. Pure; `filters.parser` interprets them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from resources.metadata.field_rules import check_length, checked_text

WORD_COMPARATORS = (("IS", "NOT", "NULL"), ("IS", "NULL"), ("NOT", "IN"), ("IN",), ("LIKE",), ("ILIKE",), ("RLIKE",))
"""Comparators that are words. RLIKE is MLflow's for traces: recognized only to be refused by name."""
NUMBER = re.compile(r"[-+]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?")
"""Possessive quantifiers: without them, 100,000 digits that are no number would cost quadratic time."""
MAX_FILTER_LENGTH = 1_000_000
"""Maximum length of a filter. Listing as many runs as a page holds takes a third of it."""
TOKEN = re.compile(
    rf"\s*(?:(?P<string>'[^']*'|\"[^\"]*\")|(?P<number>{NUMBER.pattern}(?![\w.]))"
    r"|(?P<operator><=|>=|<>|==|!=|=|<|>)|(?P<mark>[(),])"
    r"|(?P<name>(?:[A-Za-z_][\w\-/]*|`[^`]*`)(?:\.(?:`[^`]*`|\"[^\"]*\"|'[^']*'|[\w\-/.]+))?))"
)


@dataclass(frozen=True)
class Token:
    kind: str
    text: str


OPENING, CLOSING = Token("mark", "("), Token("mark", ")")


def tokenize(text: str) -> tuple[list[Token], str]:
    """Split text into tokens; return them and the rest that cannot be tokenized."""
    checked_text(text, "filter")
    check_length("filter", text, MAX_FILTER_LENGTH)
    tokens: list[Token] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            return tokens, text[position:].strip()
        tokens.append(Token(match.lastgroup, match.group(match.lastgroup)))
        position = match.end()
    return tokens, ""


def parse_comparator(tokens: Sequence[Token], position: int) -> tuple[str, int]:
    """Return the comparator at a token (empty if none) and the position after it."""
    for words in WORD_COMPARATORS:
        here = tokens[position : position + len(words)]
        if len(here) == len(words) and all(is_word(token, word) for token, word in zip(here, words, strict=True)):
            return " ".join(words), position + len(words)
    if position >= len(tokens) or tokens[position].kind != "operator":
        return "", position
    return tokens[position].text, position + 1


def is_word(token: Token, word: str) -> bool:
    return token.kind == "name" and token.text.upper() == word


def as_name(token: Token) -> Token:
    """Convert a token to a field name: double-quoted text is a name, as in SQL."""
    return Token("name", token.text) if token.kind == "string" and token.text[0] == '"' else token


def unquote_name(name: str) -> str:
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "`\"'" else name
