"""Parse MLflow's filter and order language into conditions.

`metrics.loss < 0.1 and tags.team = 'x'` becomes a list of two. Pure: SQL is made by `filters.sql`, and which fields an
entity has is defined by a `Grammar`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from resources.errors import HanzoError, invalid
from resources.metadata.field_rules import printable
from resources.metadata.filters.tokenizer import (
    CLOSING,
    NUMBER,
    OPENING,
    Token,
    as_name,
    is_word,
    parse_comparator,
    tokenize,
    unquote_name,
)

NUMERIC = frozenset({">", ">=", "=", "!=", "<", "<="})
TEXT = frozenset({"=", "!=", "LIKE", "ILIKE"})
NULLABLE_TEXT = TEXT | {"IS NULL", "IS NOT NULL"}
LISTABLE_TEXT = TEXT | {"IN", "NOT IN"}
ALL_ENTITIES = frozenset({"attribute", "metric", "param", "tag"})
MAX_CONDITIONS = 100
MAX_ORDERS = 20
MAX_VALUES = 30_000
MAX_PATTERN = 5000
"""SQLite allows 32,766 values, 1000 nested conditions, 64 joined tables, and patterns of 50,000 bytes."""

Value = str | float | tuple[str, ...] | None
NOUNS = {
    "attribute": "attributes",
    "param": "parameter (e.g. 'my-value')",
    "tag": "tag (e.g. 'my-value')",
    "dataset": "dataset attributes",
}


@dataclass(frozen=True)
class Condition:
    """One comparison. `value` is None for IS [NOT] NULL, a tuple for [NOT] IN.

    `entity` is attribute, metric, param, tag or dataset.
    """

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
    """The fields of one kind of entity; attributes map names and aliases to columns.

    `keyed_operators` are those of params and tags, `dataset_keys` the fields of a dataset, `sortable` the entities that an
    order may name, `quotable` the numeric columns whose values may be quoted.

    The last three are the first words of error messages: MLflow's clients match them, and they differ between searches.
    """

    numbers: Mapping[str, str]
    texts: Mapping[str, str]
    entities: Mapping[str, str]
    orders: Mapping[str, str]
    quotable: frozenset[str] = frozenset()
    keyed_operators: frozenset[str] = NULLABLE_TEXT
    dataset_keys: frozenset[str] = frozenset()
    sortable: frozenset[str] = ALL_ENTITIES
    malformed: str = "Invalid clause(s) in filter string"
    bad_comparator: str = "Invalid comparator"
    bad_order: str = "Invalid attribute key"


def parse_filter(text: str, grammar: Grammar) -> list[Condition]:
    """Parse a filter into conditions that must all hold. Raises a 400."""
    tokens, rest = tokenize(text)
    if rest.startswith(";"):
        raise invalid(f"Search filter contained multiple expression '{printable(text)}'. Provide AND-ed expression list.")
    if rest:
        raise invalid(f"{grammar.malformed}: '{printable(rest)}'")
    conditions: list[Condition] = []
    position = 0
    while position < len(tokens):
        if len(conditions) == MAX_CONDITIONS:
            raise invalid(f"A filter string can contain at most {MAX_CONDITIONS} comparisons")
        if conditions:
            if not is_word(tokens[position], "AND"):
                raise _malformed(tokens[position:], grammar)
            position += 1
        condition, position = _condition(tokens, position, grammar)
        conditions.append(condition)
    return conditions


def refuse_too_many_values(experiment_ids: Sequence[int], conditions: Sequence[Condition]) -> None:
    """Raise a 400 if a search has too many values.

    Otherwise the database would fail as if it were unavailable, and the call would be retried.
    """
    named = sum(len(condition.value) for condition in conditions if isinstance(condition.value, tuple))
    if (count := len(experiment_ids) + named) > MAX_VALUES:
        raise invalid(f"A search can name at most {MAX_VALUES} experiments and values, and this one names {count}: split it")


def parse_orders(texts: Iterable[str], grammar: Grammar) -> list[Order]:
    """Parse orders such as `metrics.loss DESC`. Raises a 400 for an unsortable field."""
    orders: list[Order] = []
    for text in texts:
        if len(orders) == MAX_ORDERS:
            raise invalid(f"order_by can contain at most {MAX_ORDERS} fields")
        tokens, rest = tokenize(text)
        tokens[:1] = map(as_name, tokens[:1])
        if rest or len(tokens) not in (1, 2) or any(token.kind != "name" for token in tokens):
            raise invalid(
                f"Invalid order_by clause '{printable(text)}'. Could not be parsed: name a field, then ASC or DESC"
            )
        direction = tokens[1].text.upper() if len(tokens) == 2 else "ASC"
        if direction not in ("ASC", "DESC"):
            raise invalid(f"Invalid ordering key in order_by clause '{printable(text)}'.")
        entity, key = _identifier(tokens[0].text, grammar, grammar.orders, grammar.bad_order)
        if entity not in grammar.sortable:
            raise invalid(f"Invalid order_by entity: {entity}")
        if any((order.entity, order.key) == (entity, key) for order in orders):
            raise invalid(f"`order_by` contains duplicate fields: '{printable(text)}'")
        orders.append(Order(entity, key, direction == "ASC"))
    return orders


def _condition(tokens: list[Token], start: int, grammar: Grammar) -> tuple[Condition, int]:
    """Parse the condition at a token; return it and the position after it.

    Syntax is checked before names.
    """
    operator, position = parse_comparator(tokens, start + 1)
    has_value = operator not in ("", "IS NULL", "IS NOT NULL")
    first = as_name(tokens[start]) if start < len(tokens) else Token("mark", "")
    if not operator or first.kind not in ("name", "number") or (has_value and not _is_value(tokens[position:], operator)):
        raise _malformed(tokens[start:], grammar)
    if first.kind == "number":
        raise invalid(f"Invalid comparison clause. Expected 'Identifier' found '{first.text}'")
    entity, key = _identifier(first.text, grammar, {**grammar.numbers, **grammar.texts}, "Invalid attribute key")
    # Error messages name an attribute as the client wrote it, not the column it maps to (`name` for run_name).
    written = unquote_name(first.text.partition(".")[2] or first.text) if entity == "attribute" else key
    numeric = entity == "metric" or (entity == "attribute" and key in grammar.numbers.values())
    listable = entity in ("attribute", "dataset")
    allowed = NUMERIC if numeric else LISTABLE_TEXT if listable else grammar.keyed_operators
    if operator not in allowed and operator in grammar.keyed_operators and not has_value:
        supported = "tags" if "param" not in grammar.entities.values() else "tags and params"
        raise invalid(f"IS NULL / IS NOT NULL is only supported for {supported}, not for '{entity}' '{printable(written)}'")
    if operator not in allowed:
        raise invalid(f"{grammar.bad_comparator} '{operator}' not one of '{', '.join(sorted(allowed))}'")
    if not has_value:
        return Condition(entity, key, operator, None), position
    if operator in ("IN", "NOT IN"):
        values, position = _list(tokens, position)
        return Condition(entity, key, operator, values), position
    value = tokens[position]
    if key in grammar.quotable and value.kind == "string" and NUMBER.fullmatch(value.text[1:-1]):
        value = Token("number", value.text[1:-1])
    if numeric:
        subject = "metric" if entity == "metric" else f"numeric attribute: {written}"
        return Condition(entity, key, operator, _number(value, subject)), position + 1
    return Condition(entity, key, operator, _text(value, NOUNS[entity])), position + 1


def _identifier(text: str, grammar: Grammar, attributes: Mapping[str, str], unknown: str) -> tuple[str, str]:
    name, dot, key = text.partition(".")
    entity = grammar.entities.get(unquote_name(name)) if dot else "attribute"
    if entity is None:
        valid = ", ".join(sorted(set(grammar.entities.values())))
        raise invalid(f"Invalid entity type '{printable(name)}'. Valid values are {valid}")
    key = unquote_name(key if dot else text)
    if entity == "dataset" and key not in grammar.dataset_keys:
        valid = ", ".join(sorted(grammar.dataset_keys))
        raise invalid(f"Invalid dataset key '{printable(key)}' specified. Valid keys are '{valid}'")
    if entity != "attribute":
        return entity, key
    if key not in attributes:
        raise invalid(f"{unknown} '{printable(key)}' specified. Valid keys are '{', '.join(sorted(attributes))}'")
    return entity, attributes[key]


def _is_value(following: list[Token], operator: str) -> bool:
    """Return whether the tokens after a comparator can be a value; SQL's `true` cannot."""
    if operator in ("IN", "NOT IN"):
        return following[:1] == [OPENING] and CLOSING in following
    return (
        bool(following)
        and following[0].kind in ("string", "number", "name")
        and not (is_word(following[0], "TRUE") or is_word(following[0], "FALSE"))
    )


def _number(token: Token, subject: str) -> float:
    if token.kind != "number":
        raise invalid(f"Expected numeric value type for {subject}. Found {printable(token.text)}")
    return float(token.text)


def _text(token: Token, noun: str) -> str:
    if token.kind == "name":
        raise invalid(
            "Parameter value is either not quoted or unidentified quote types used for string value "
            f"{printable(token.text)}. Use either single or double quotes."
        )
    if token.kind != "string":
        raise invalid(f"Expected a quoted string value for {noun}. Got value {printable(token.text)}")
    if len(token.text) > MAX_PATTERN:
        raise invalid(f"A value exceeds the maximum length of {MAX_PATTERN} characters")
    return token.text[1:-1]


def _list(tokens: list[Token], start: int) -> tuple[tuple[str, ...], int]:
    """Parse a parenthesized list of strings; a trailing comma is allowed, as in Python's ('a',)."""
    end = tokens.index(CLOSING, start)
    inside = tokens[start + 1 : end]
    wanted = "While parsing a list in the query, expected"
    if not inside:
        raise invalid(f"{wanted} a non-empty list of string values, but got empty list")
    if any(token.kind not in ("string", "mark") for token in inside):
        shown = printable(", ".join(token.text for token in inside))
        raise invalid(f"{wanted} string value, punctuation, or whitespace, but got different type in list: ({shown})")
    if any(token.kind != "string" for token in inside[::2]) or any(token.text != "," for token in inside[1::2]):
        raise invalid(f"{wanted} a non-empty list of string values, but got ill-formed list.")
    return tuple(token.text[1:-1] for token in inside[::2]), end + 1


def _malformed(tokens: list[Token], grammar: Grammar) -> HanzoError:
    return invalid(f"{grammar.malformed}: '{printable(' '.join(token.text for token in tokens))}'")
