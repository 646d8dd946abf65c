"""Execute a GraphQL document against an object whose methods are the fields of `schema.graphql`'s Query."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from graphql import (
    DocumentNode,
    ExecutionResult,
    FieldNode,
    FragmentDefinitionNode,
    FragmentSpreadNode,
    GraphQLResolveInfo,
    GraphQLScalarType,
    GraphQLSchema,
    InlineFragmentNode,
    OperationDefinitionNode,
    SelectionNode,
    SelectionSetNode,
    build_schema,
    execute_sync,
    parse,
    validate,
)
from graphql.error import GraphQLError

from resources.errors import invalid

MAX_ROOT_FIELDS = 10
MAX_ALIASES = 10
"""Per level: each alias requests the same field again."""
MAX_DEPTH = 10
MAX_SELECTIONS = 1000

Fragments = Mapping[str, FragmentDefinitionNode]


def exceeded_limit(document: DocumentNode) -> str | None:
    """Return which limit a document exceeds, or None.

    A fragment counts at each use, and a recursive one reaches the depth limit.
    """
    nodes = document.definitions
    fragments = {node.name.value: node for node in nodes if isinstance(node, FragmentDefinitionNode)}
    levels = [(node.selection_set, 1) for node in nodes if isinstance(node, OperationDefinitionNode)]
    roots = aliases = selections = 0
    while levels:
        level, depth = levels.pop()
        if depth > MAX_DEPTH:
            return f"Query exceeds maximum depth of {MAX_DEPTH}"
        fields = list(selected_fields(level, fragments))
        roots += len(fields) if depth == 1 else 0
        selections += len(fields)
        if selections > MAX_SELECTIONS:
            return f"Query exceeds maximum total selections of {MAX_SELECTIONS}"
        aliases = max(aliases, sum(field.alias is not None for field in fields))
        levels += [(field.selection_set, depth + 1) for field in fields if field.selection_set]
    if roots > MAX_ROOT_FIELDS:
        return f"GraphQL queries should have at most {MAX_ROOT_FIELDS} root fields, got {roots} root fields."
    if aliases > MAX_ALIASES:
        return f"GraphQL queries should have at most {MAX_ALIASES} aliases, got {aliases} aliases."
    return None


def selected_fields(level: SelectionSetNode, fragments: Fragments) -> Iterator[FieldNode]:
    """Yield the fields of one level, expanding each named fragment once."""
    waiting: list[SelectionNode] = list(level.selections)
    known: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, FieldNode):
            yield node
        elif isinstance(node, InlineFragmentNode):
            waiting += node.selection_set.selections
        elif isinstance(node, FragmentSpreadNode) and (name := node.name.value) in fragments and name not in known:
            known.add(name)
            waiting += fragments[name].selection_set.selections


MAX_TOKENS = 5000
"""The UI's largest document has 180. `exceeded_limit` restricts what a shorter one may request."""


def execute(
    root: object,
    document: str,
    variables: dict[str, Any] | None,
    operation: str | None,
    public_message: Callable[[Exception], str],
) -> dict[str, Any]:
    """Return the document's response; problems with its fields are in `errors`, as in GraphQL.

    Args:
        public_message: text for an error of a field, whose own text may contain SQL and belongs to the server's log.

    Raises:
        HanzoError: it is not GraphQL, or too long.
    """
    try:
        parsed = parse(document, max_tokens=MAX_TOKENS)
        refusal = exceeded_limit(parsed)
        problems = [GraphQLError(refusal)] if refusal else validate(schema(), parsed)
    except (GraphQLError, RecursionError) as error:
        raise invalid(f"The GraphQL document cannot be read: {str(error)[:200]}") from None
    result = ExecutionResult(None, problems[:5]) if problems else None
    result = result or execute_sync(
        schema(), parsed, root, variable_values=variables, operation_name=operation, field_resolver=resolve_field
    )
    errors = [error_message(problem, public_message) for problem in result.errors or ()]
    return {"data": result.data, "errors": errors or None}


def error_message(problem: GraphQLError, public_message: Callable[[Exception], str]) -> str:
    cause = problem.original_error
    return problem.message if cause is None or isinstance(cause, GraphQLError) else public_message(cause)


def resolve_field(source: Any, info: GraphQLResolveInfo, **arguments: Any) -> Any:
    """Resolve a field by its snake_case name: root method or message key."""
    name = snake_case(info.field_name)
    if not isinstance(source, Mapping):
        return getattr(source, name)(arguments.get("input", arguments) or {})
    value = source.get(name)
    # JSON has no NaN, and neither has GraphQL's Float.
    return None if value == "NaN" or (isinstance(value, float) and not math.isfinite(value)) else value


def snake_case(name: str) -> str:
    """Convert `experimentId` to `experiment_id`."""
    return re.sub(r"(?<=[a-z])([A-Z])", lambda match: f"_{match[1].lower()}", name)


@cache
def schema() -> GraphQLSchema:
    built = build_schema((Path(__file__).parent / "schema.graphql").read_text(encoding="utf-8"))
    # JavaScript has no 64-bit integers.
    cast(GraphQLScalarType, built.type_map["LongString"]).serialize = str  # type: ignore[assignment, method-assign]
    return built
