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
from resources.errors import invalid

MAX_TOKENS = 5000
"""The UI's largest document has 180. What a shorter one may ask for is `graphql_limits`'."""


def answer(
    questions: object,
    document: str,
    variables: dict[str, Any] | None,
    operation: str | None,
    told: Callable[[Exception], str],
) -> dict[str, Any]:
    """The document's answer; what is wrong with its fields comes back in `errors`, as GraphQL has it.

    Args:
        told: what to say of an error of a question. Its own text is for the server's log: a database's has SQL in it.

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
    errors = [message_of(problem, told) for problem in result.errors or ()]
    return {"data": result.data, "errors": errors or None}


def message_of(problem: GraphQLError, told: Callable[[Exception], str]) -> str:
    cause = problem.original_error
    return problem.message if cause is None or isinstance(cause, GraphQLError) else told(cause)


def resolve(source: Any, info: GraphQLResolveInfo, **arguments: Any) -> Any:
    """A field by its snake_case name: of the questions a method, of a message a key."""
    name = snake_case(info.field_name)
    if not isinstance(source, Mapping):
        return getattr(source, name)(arguments.get("input", arguments) or {})
    value = source.get(name)
    # JSON has no NaN, and neither has GraphQL's Float.
    return None if value == "NaN" or (isinstance(value, float) and not math.isfinite(value)) else value


def snake_case(name: str) -> str:
    """`experimentId` -> `experiment_id`."""
    return re.sub(r"(?<=[a-z])([A-Z])", lambda match: f"_{match[1].lower()}", name)


@cache
def schema() -> GraphQLSchema:
    built = build_schema((Path(__file__).parent / "schema.graphql").read_text())
    # JavaScript has no integers of 64 bits.
    cast(GraphQLScalarType, built.type_map["LongString"]).serialize = str  # type: ignore[assignment, method-assign]
    return built
