"""MLflow's filter and order language as data: `metrics.loss < 0.1 and tags.team = 'x'` becomes a list of conditions.

Pure: no SQL here (`filter_sql`), and no knowledge of which fields a thing has: that is what a `Grammar` says.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resources.errors import invalid
from resources.metadata.tracking_rules import checked_text, printable

NUMERIC = frozenset({">", ">=", "=", "!=", "<", "<="})
TEXT = frozenset({"=", "!=", "LIKE", "ILIKE"})
NULLABLE_TEXT = TEXT | {"IS NULL", "IS NOT NULL"}
LISTABLE_TEXT = TEXT | {"IN", "NOT IN"}
EVERYTHING = frozenset({"attribute", "metric", "param", "tag"})
MAX_CONDITIONS = 100
MAX_ORDERS = 20
MAX_PATTERN = 5000
"""SQLite nests conditions at most 1000 deep, joins 64 tables and matches patterns up to 50,000 bytes."""

Value = str | float | tuple[str, ...] | None
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
TOKEN = re.compile(
    rf"\s*(?:(?P<string>'[^']*'|\"[^\"]*\")|(?P<number>{NUMBER.pattern}(?![\w.]))"
    r"|(?P<operator><=|>=|!=|=|<|>)|(?P<mark>[(),])"
    r"|(?P<name>[A-Za-z_][\w\-/]*(?:\.(?:`[^`]*`|\"[^\"]*\"|[\w\-/.]+))?|`[^`]*`))"
)


@dataclass(frozen=True)
class Condition:
    """`entity` is attribute, metric, param, tag or dataset; `value` is None for IS [NOT] NULL, a tuple for [NOT] IN."""

    entity: str
    key: str
    operator: str
    value: Value


@dataclass(frozen=True)
class Order:
    entity: str
    key: str
    ascending: bool


@dataclass(frozen=True)
class Grammar:
    """What may be asked of one kind of thing. Attributes map a name (aliases too) to the column that it means.

    `keyed_operators` are those of params and tags, `dataset_keys` what is known of a dataset, `sortable` the entities that
    an order may name, `quotable` the columns of numbers that may be written as text too.
    """

    numbers: Mapping[str, str]
    texts: Mapping[str, str]
    entities: Mapping[str, str]
    orders: Mapping[str, str]
    quotable: frozenset[str] = frozenset()
    keyed_operators: frozenset[str] = NULLABLE_TEXT
    dataset_keys: frozenset[str] = frozenset()
    sortable: frozenset[str] = EVERYTHING


@dataclass(frozen=True)
class Token:
    kind: str
    text: str


def parse_filter(text: str, grammar: Grammar) -> list[Condition]:
    """The conditions of a filter, all of which must hold. Raises a 400 that names the clause."""
    tokens = tokenize(text)
    conditions: list[Condition] = []
    position = 0
    while position < len(tokens):
        if conditions:
            if not _is_word(tokens[position], "AND"):
                raise invalid(f"Invalid clause(s) in filter string: '{printable(tokens[position].text)}'")
            position += 1
        condition, position = _condition(tokens, position, grammar)
        conditions.append(condition)
    if len(conditions) > MAX_CONDITIONS:
        raise invalid(f"A filter string can contain at most {MAX_CONDITIONS} comparisons")
    return conditions


def parse_orders(texts: Iterable[str], grammar: Grammar) -> list[Order]:
    """Orders such as `metrics.loss DESC`. Raises a 400 for a field that cannot be ordered by."""
    orders: list[Order] = []
    for text in texts:
        tokens = tokenize(text)
        direction = tokens[1].text.upper() if len(tokens) == 2 else "ASC"
        if direction not in ("ASC", "DESC"):
            raise invalid(f"Invalid ordering key in order_by clause '{printable(text)}'.")
        if not tokens or len(tokens) > 2 or tokens[0].kind != "name":
            raise invalid(f"Invalid order_by clause '{printable(text)}': it must be a field, then ASC or DESC")
        entity, key = _identifier(tokens[0].text, grammar, grammar.orders)
        if entity not in grammar.sortable:
            raise invalid(f"Invalid order_by entity: {entity}")
        if any((order.entity, order.key) == (entity, key) for order in orders):
            raise invalid(f"`order_by` contains duplicate fields: '{printable(text)}'")
        orders.append(Order(entity, key, direction == "ASC"))
    if len(orders) > MAX_ORDERS:
        raise invalid(f"order_by can contain at most {MAX_ORDERS} fields")
    return orders


def tokenize(text: str) -> list[Token]:
    checked_text(text, "filter")
    tokens: list[Token] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise invalid(f"Invalid clause(s) in filter string: '{printable(text[position:].strip())}'")
        tokens.append(Token(match.lastgroup, match.group(match.lastgroup)))
        position = match.end()
    return tokens


def _condition(tokens: list[Token], start: int, grammar: Grammar) -> tuple[Condition, int]:
    if start >= len(tokens) or tokens[start].kind != "name":
        raise invalid("Invalid comparison clause. Expected a field such as metrics.loss")
    entity, key = _identifier(tokens[start].text, grammar, {**grammar.numbers, **grammar.texts})
    operator, position = _operator(tokens, start + 1)
    numeric = entity == "metric" or (entity == "attribute" and key in grammar.numbers.values())
    listable = entity in ("attribute", "dataset")
    allowed = NUMERIC if numeric else LISTABLE_TEXT if listable else grammar.keyed_operators
    if operator not in allowed and operator in ("IS NULL", "IS NOT NULL"):
        raise invalid(f"IS NULL / IS NOT NULL is only supported for tags and params, not for '{entity}' '{printable(key)}'")
    if operator not in allowed:
        raise invalid(f"Invalid comparator '{operator}' not one of '{', '.join(sorted(allowed))}'")
    if operator in ("IS NULL", "IS NOT NULL"):
        return Condition(entity, key, operator, None), position
    if operator in ("IN", "NOT IN"):
        values, position = _list(tokens, position)
        return Condition(entity, key, operator, values), position
    if position >= len(tokens):
        raise invalid(f"Invalid comparison clause. Expected a value after '{key} {operator}'")
    what = "metric" if entity == "metric" else f"numeric attribute: {key}" if numeric else printable(key)
    value = tokens[position]
    if key in grammar.quotable and value.kind == "string" and NUMBER.fullmatch(value.text[1:-1]):
        value = Token("number", value.text[1:-1])
    return Condition(entity, key, operator, _value(value, what, numeric)), position + 1


def _identifier(text: str, grammar: Grammar, attributes: Mapping[str, str]) -> tuple[str, str]:
    name, dot, key = ("", "", text) if text.startswith("`") else text.partition(".")
    entity = grammar.entities.get(name) if dot else "attribute"
    if entity is None:
        valid = ", ".join(sorted(set(grammar.entities.values())))
        raise invalid(f"Invalid entity type '{printable(name)}'. Valid values are {valid}")
    key = (key if dot else text).strip('`"')
    if entity == "dataset" and key not in grammar.dataset_keys:
        valid = ", ".join(sorted(grammar.dataset_keys))
        raise invalid(f"Invalid dataset key '{printable(key)}' specified. Valid keys are '{valid}'")
    if entity != "attribute":
        return entity, key
    if key not in attributes:
        raise invalid(
            f"Invalid attribute key '{printable(key)}' specified. Valid keys are '{', '.join(sorted(attributes))}'"
        )
    return entity, attributes[key]


def _operator(tokens: list[Token], position: int) -> tuple[str, int]:
    for words in (("IS", "NOT", "NULL"), ("IS", "NULL"), ("NOT", "IN"), ("IN",), ("LIKE",), ("ILIKE",)):
        here = tokens[position : position + len(words)]
        if len(here) == len(words) and all(_is_word(token, word) for token, word in zip(here, words, strict=True)):
            return " ".join(words), position + len(words)
    if position >= len(tokens) or tokens[position].kind != "operator":
        raise invalid("Invalid comparison clause. Expected 3 tokens: a field, a comparator and a value")
    return tokens[position].text, position + 1


def _value(token: Token, what: str, numeric: bool) -> Value:
    if numeric:
        if token.kind != "number":
            raise invalid(f"Expected numeric value type for {what}. Found {printable(token.text)}")
        return float(token.text)
    if token.kind != "string":
        raise invalid(f"Expected a quoted string value for {what} (e.g. 'my-value'). Got value {printable(token.text)}")
    if len(token.text) > MAX_PATTERN:
        raise invalid(f"The value compared with {what} exceeds the maximum length of {MAX_PATTERN} characters")
    return token.text[1:-1]


def _list(tokens: list[Token], position: int) -> tuple[tuple[str, ...], int]:
    values: list[str] = []
    expected = "("
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if expected == "value" and token.kind == "string":
            values.append(token.text[1:-1])
            expected = ","
        elif values and token.text == ")" and token.kind == "mark":
            # Also behind a comma: Python writes a tuple of one as ('a',), and clients format their tuples.
            return tuple(values), position
        elif expected != "value" and token.kind == "mark" and token.text in expected:
            expected = "value"
        else:
            break
    raise invalid("Expected a non-empty list of quoted string values in parentheses, such as ('a', 'b')")


def _is_word(token: Token, word: str) -> bool:
    return token.kind == "name" and token.text.upper() == word
