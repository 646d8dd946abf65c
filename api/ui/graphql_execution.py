"""Executing a GraphQL document against an object whose methods are the fields of `schema.graphql`'s Query."""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from graphql import (
    ExecutionResult,
    GraphQLResolveInfo,
    GraphQLScalarType,
    GraphQLSchema,
    build_schema,
    execute_sync,
    parse,
    validate,
)
from graphql.error import GraphQLError

from api.ui.graphql_limits import too_much
from resources.errors import HanzoError, invalid

MAX_TOKENS = 5000
"""The UI's largest document has 180. What a shorter one may ask for is `graphql_limits`'."""


def answer(questions: object, document: str, variables: dict[str, Any] | None, operation: str | None) -> dict[str, Any]:
    """The document's answer; what is wrong with its fields comes back in `errors`, as GraphQL has it.

    Raises:
        HanzoError: it is no GraphQL, or too long.
    """
    try:
        parsed = parse(document, max_tokens=MAX_TOKENS)
        refusal = too_much(parsed)
        problems = [GraphQLError(refusal)] if refusal else validate(schema(), parsed)
    except (GraphQLError, RecursionError) as error:
        raise invalid(f"The GraphQL document cannot be read: {str(error)[:200]}") from None
    result = ExecutionResult(None, problems[:5]) if problems else None
    result = result or execute_sync(
        schema(), parsed, questions, variable_values=variables, operation_name=operation, field_resolver=resolve
    )
    return {"data": result.data, "errors": [problem.message for problem in result.errors] if result.errors else None}


def resolve(source: Any, info: GraphQLResolveInfo, **arguments: Any) -> Any:
    """A field by its snake_case name: of the questions a method, of a message a key."""
    name = snake_case(info.field_name)
    if not isinstance(source, Mapping):
        return or_refusal(getattr(source, name), arguments.get("input") or {})
    value = source.get(name)
    # JSON has no NaN, and neither has GraphQL's Float.
    return None if value == "NaN" or (isinstance(value, float) and not math.isfinite(value)) else value


def or_refusal(question: Callable[[Mapping[str, Any]], dict[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """A question's answer. What is refused has none, and stands in the answer's `errors`, as in MLflow's server."""
    try:
        return question(given)
    except HanzoError as error:
        raise GraphQLError(error.message) from None


def snake_case(name: str) -> str:
    """`experimentId` -> `experiment_id`."""
    return re.sub(r"(?<=[a-z])([A-Z])", lambda match: f"_{match[1].lower()}", name)


@cache
def schema() -> GraphQLSchema:
    built = build_schema((Path(__file__).parent / "schema.graphql").read_text())
    # JavaScript has no integers of 64 bits.
    cast(GraphQLScalarType, built.type_map["LongString"]).serialize = str  # type: ignore[assignment, method-assign]
    return built
