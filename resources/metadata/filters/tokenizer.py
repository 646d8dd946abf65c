"""The words and signs of MLflow's filter language. Pure: what they mean together is decided in `filters.parser`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from resources.metadata.field_rules import check_length, checked_text

WORD_COMPARATORS = (("IS", "NOT", "NULL"), ("IS", "NULL"), ("NOT", "IN"), ("IN",), ("LIKE",), ("ILIKE",), ("RLIKE",))
"""Comparators that are words. RLIKE is one of MLflow's for traces: it is known here in order to be refused by name."""
NUMBER = re.compile(r"[-+]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?")
"""Digits are not given back: one of 100,000 that is no number would be read again from each of them."""
MAX_FILTER_LENGTH = 1_000_000
"""Of a filter: what lists as many runs as a page has is a third of it."""
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
    """The tokens of a text, and what is left of it from where it cannot be read on."""
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
    """The comparator at a token, and where its value begins; an empty one where none is."""
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
    """The token where a field is to be named: there a text in double quotes is a name, as in SQL."""
    return Token("name", token.text) if token.kind == "string" and token.text[0] == '"' else token


def unquote_name(name: str) -> str:
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "`\"'" else name
