"""Filter and order parsing: refusals begin with MLflow's words, which its clients match."""

import pytest

from resources.errors import HanzoError
from resources.metadata.filters.parser import Condition, Grammar, Order, parse_filter, parse_orders
from resources.metadata.registry.search import MODEL_GRAMMAR, VERSION_GRAMMAR
from resources.metadata.tracking.experiment_search import EXPERIMENT_GRAMMAR
from resources.metadata.tracking.logged_model_search import LOGGED_MODEL_GRAMMAR
from resources.metadata.tracking.run_search import RUN_GRAMMAR

CLAUSE = "Invalid clause(s) in filter string: '"
LIST = "While parsing a list in the query, expected "


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("metrics.loss > 1; metrics.loss < 2", "Search filter contained multiple expression 'metrics.loss > 1; "),
        ("metrics.loss > 1 OR metrics.loss < 0", f"{CLAUSE}OR metrics.loss < 0'"),
        ("metrics.loss > 1 AND (params.a = 'b')", CLAUSE),
        ("metrics.loss > 1 AND", CLAUSE),
        ("metrics.loss", CLAUSE),
        ("metrics.loss >", CLAUSE),
        ("run_name LIKE", CLAUSE),
        ("'loss'", CLAUSE),
        ("params.a = = 'b'", CLAUSE),
        ("params.a = true", CLAUSE),
        ("params.a = 'b", CLAUSE),
        ("params.a IS 'b'", CLAUSE),
        ("run_id IN", CLAUSE),
        ("run_id IN ('a'", CLAUSE),
        ("run_id IN 'a'", CLAUSE),
        ("run_id = ('a')", CLAUSE),
        ("run_id IN ()", f"{LIST}a non-empty list of string values, but got empty list"),
        ("run_id IN (1, 2)", f"{LIST}string value, punctuation, or whitespace, but got different type in list: (1, "),
        ("run_id IN (,)", f"{LIST}a non-empty list of string values, but got ill-formed list."),
        ("run_id IN ('a',,'b')", f"{LIST}a non-empty list of string values, but got ill-formed list."),
        ("run_id IN ('a' 'b')", f"{LIST}a non-empty list of string values, but got ill-formed list."),
        ("0.5 < metrics.loss", "Invalid comparison clause. Expected 'Identifier' found '0.5'"),
        ("loss > 1", "Invalid attribute key 'loss' specified"),
        ("m.loss > 1", "Invalid entity type 'm'"),
        ("`metrics.loss` > 1", "Invalid entity type '`metrics'"),
        ("params.a >= 'b'", "Invalid comparator '>=' not one of"),
        ("params.a == 'b'", "Invalid comparator '==' not one of"),
        ("params.a <> 'b'", "Invalid comparator '<>' not one of"),
        ("tags.a RLIKE 'b'", "Invalid comparator 'RLIKE' not one of"),
        ("metrics.loss IS NULL", "IS NULL / IS NOT NULL is only supported for tags and params"),
        ("metrics.loss = 'a'", "Expected numeric value type for metric. Found 'a'"),
        ("start_time > x", "Expected numeric value type for numeric attribute: start_time. Found x"),
        ("attributes.`created` > x", "Expected numeric value type for numeric attribute: created. Found x"),
        ("run_name IS NULL", "IS NULL / IS NOT NULL is only supported for tags and params, not for 'attribute' 'run_name'"),
        ("status = 1", "Expected a quoted string value for attributes. Got value 1"),
        ("params.a = 1", "Expected a quoted string value for parameter (e.g. 'my-value'). Got value 1"),
        ("tags.a = 1", "Expected a quoted string value for tag (e.g. 'my-value'). Got value 1"),
        ("dataset.name = 1", "Expected a quoted string value for dataset attributes. Got value 1"),
        ("params.a = b", "Parameter value is either not quoted or unidentified quote types used for string value b."),
        ("params.a = `b`", "Parameter value is either not quoted or unidentified quote types used for string value `b`."),
    ],
)
def test_invalid_run_filter_is_rejected_with_the_expected_message(text: str, refusal: str) -> None:
    assert refusing(text, RUN_GRAMMAR).startswith(refusal)


@pytest.mark.parametrize(
    ("text", "grammar", "refusal"),
    [
        ("name", LOGGED_MODEL_GRAMMAR, "Invalid filter string: 'name'"),
        ("name = 'a' OR name = 'b'", LOGGED_MODEL_GRAMMAR, "Invalid filter string: 'OR name = 'b''"),
        ("name > 'a'", LOGGED_MODEL_GRAMMAR, "Invalid comparison operator '>'"),
        ("metrics.loss LIKE 0", LOGGED_MODEL_GRAMMAR, "Invalid comparison operator 'LIKE'"),
        ("name IS NULL", EXPERIMENT_GRAMMAR, "IS NULL / IS NOT NULL is only supported for tags, not for"),
        ("tags.a IS NULL", MODEL_GRAMMAR, "Invalid comparator 'IS NULL' not one of '!=, =, ILIKE, LIKE'"),
        ("nothing = true", MODEL_GRAMMAR, CLAUSE),
        ("version_number = x", VERSION_GRAMMAR, "Expected numeric value type for numeric attribute: version_number. "),
    ],
)
def test_invalid_filter_of_another_grammar_is_rejected_with_the_expected_message(
    text: str, grammar: Grammar, refusal: str
) -> None:
    assert refusing(text, grammar).startswith(refusal)


@pytest.mark.parametrize("text", ["1" * 300_000 + "x", "version_number = '" + "1" * 300_000 + "x'"])
@pytest.mark.parametrize("grammar", [RUN_GRAMMAR, VERSION_GRAMMAR])
def test_malformed_number_is_scanned_only_once(text: str, grammar: Grammar) -> None:
    """Regression: rescanning from each digit blocked the server for an hour."""
    with pytest.raises(HanzoError):
        parse_filter(text, grammar)


def test_filter_beyond_the_length_limit_is_refused() -> None:
    with pytest.raises(HanzoError, match="'filter' exceeds the maximum length"):
        parse_filter("a" * 1_000_001, RUN_GRAMMAR)


def test_a_name_may_be_quoted_whole_or_in_parts() -> None:
    quoted = "`params`.`learning rate` = 'x' and metrics.\"a b\" > 1 and tags.'c d' = 'z' and attributes.`Run name` = 'y'"
    assert parse_filter(quoted, RUN_GRAMMAR) == [
        Condition("param", "learning rate", "=", "x"),
        Condition("metric", "a b", ">", 1.0),
        Condition("tag", "c d", "=", "z"),
        Condition("attribute", "name", "=", "y"),
    ]


@pytest.mark.parametrize(
    ("text", "grammar", "refusal"),
    [
        ("`metrics.loss", RUN_GRAMMAR, "Invalid order_by clause '`metrics.loss'. Could not be parsed"),
        ("metrics.loss != 1", RUN_GRAMMAR, "Invalid order_by clause 'metrics.loss != 1'. Could not be parsed"),
        ("metrics.loss DESC now", RUN_GRAMMAR, "Invalid order_by clause 'metrics.loss DESC now'. Could not be parsed"),
        ("metrics.loss down", RUN_GRAMMAR, "Invalid ordering key in order_by clause 'metrics.loss down'"),
        ("creation_timestamp", MODEL_GRAMMAR, "Invalid order by key 'creation_timestamp' specified"),
        ("run_id", VERSION_GRAMMAR, "Invalid attribute key 'run_id' specified"),
    ],
)
def test_invalid_order_is_rejected_with_the_expected_message(text: str, grammar: Grammar, refusal: str) -> None:
    with pytest.raises(HanzoError) as refused:
        parse_orders([text], grammar)
    assert refused.value.message.startswith(refusal)


def test_order_ignores_case_and_extra_whitespace() -> None:
    assert parse_orders(["timestamp\t\ndesc", "name  aSC"], MODEL_GRAMMAR) == [
        Order("attribute", "last_update_time", False),
        Order("attribute", "name", True),
    ]


def refusing(text: str, grammar: Grammar) -> str:
    with pytest.raises(HanzoError) as refused:
        parse_filter(text, grammar)
    return refused.value.message
