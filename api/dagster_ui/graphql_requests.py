"""Parse GraphQL requests into operations, mutations and their arguments."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from resources.errors import invalid

MAX_DOCUMENT_CHARACTERS = 200_000
MAX_TOKENS = 20_000
"""The largest document of Dagster's UI has about 2,000."""
CACHED_DOCUMENTS = 512
"""The UI repeats some hundred documents, and parsing one takes milliseconds: each is parsed once."""

MUTATION = "mutation"
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Mutation:
    """One mutation of a request, also from within a fragment.

    Args:
        key: its name in the response, which may be an alias.
        has_selection: it returns an object, not a scalar.
    """

    name: str
    arguments: Arguments
    key: str
    has_selection: bool


@dataclass(frozen=True)
class RootField:
    """A mutation in a document, before its arguments are evaluated."""

    name: str
    key: str
    has_selection: bool
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Operation:
    """`fields` is set for mutations only, `defaults` are those of variables."""

    kind: str
    fields: tuple[RootField, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class GraphQLRequest:
    """A parsed request; only `content` is sent to Dagster."""

    query: str
    variables: Arguments
    operation_name: str | None
    operations: tuple[Operation, ...]

    @property
    def content(self) -> dict[str, Any]:
        return {"query": self.query, "variables": self.variables, "operationName": self.operation_name}

    @property
    def has_mutation(self) -> bool:
        return any(operation.kind == MUTATION for operation in self.operations)

    @property
    def mutations(self) -> tuple[Mutation, ...]:
        """Mutations of all operations, regardless of `operationName`."""
        return tuple(mutation for operation in self.operations for mutation in list_mutations(operation, self.variables))


def read_request(document: Any) -> GraphQLRequest:
    """Read a decoded JSON body, or the parameters of a query string.

    Raises:
        HanzoError: it is not a single GraphQL request.
    """
    if isinstance(document, list):
        raise invalid("Dagster takes one GraphQL request at a time: send each of the batch by itself")
    if not isinstance(document, dict):
        raise invalid("The body must be a JSON object with the key 'query'")
    query, name = document.get("query"), document.get("operationName")
    if not isinstance(query, str) or not query.strip():
        raise invalid("The key 'query' must hold a GraphQL document: stored queries are not supported")
    if name is not None and not isinstance(name, str):
        raise invalid("The key 'operationName' must be a string")
    return GraphQLRequest(query, read_variables(document.get("variables")), name, parse_operations(query))


def read_variables(value: Any) -> Arguments:
    """Return variables as an object; Dagster also accepts them as a JSON string."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else None
        except (ValueError, RecursionError):
            raise invalid("The key 'variables' is a string, but not valid JSON") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid("The key 'variables' must be a JSON object")
    return value


@lru_cache(maxsize=CACHED_DOCUMENTS)
def parse_operations(query: str) -> tuple[Operation, ...]:
    """Return the operations of a document.

    Raises:
        HanzoError: it is not GraphQL, is too long, or contains no operation.
    """
    # Importing GraphQL takes a tenth of the server's start time, which only users of Dagster's UI should pay.
    from graphql import FragmentDefinitionNode, OperationDefinitionNode, parse
    from graphql.error import GraphQLError

    if len(query) > MAX_DOCUMENT_CHARACTERS:
        raise invalid(f"The GraphQL document is too long: at most {MAX_DOCUMENT_CHARACTERS} characters")
    try:
        document = parse(query, no_location=True, max_tokens=MAX_TOKENS)
    except (GraphQLError, RecursionError) as error:
        raise invalid(f"The GraphQL document cannot be parsed: {str(error)[:200]}") from None
    fragments = {node.name.value: node for node in document.definitions if isinstance(node, FragmentDefinitionNode)}
    found = [node for node in document.definitions if isinstance(node, OperationDefinitionNode)]
    if not found:
        raise invalid("The GraphQL document holds no operation")
    return tuple(describe_operation(node, fragments) for node in found)


def describe_operation(node: Any, fragments: Mapping[str, Any]) -> Operation:
    from api.routes.ui.graphql_execution import selected_fields

    kind = str(node.operation.value)
    if kind != MUTATION:
        return Operation(kind)
    fields = tuple(
        RootField(
            name=field.name.value,
            key=(field.alias or field.name).value,
            has_selection=field.selection_set is not None,
            arguments=tuple(field.arguments),
        )
        for field in selected_fields(node.selection_set, fragments)
    )
    defaults = tuple(
        (variable.variable.name.value, variable.default_value)
        for variable in node.variable_definitions
        if variable.default_value is not None
    )
    return Operation(kind, fields, defaults)


def list_mutations(operation: Operation, variables: Arguments) -> Iterator[Mutation]:
    """Yield the mutations of an operation with their arguments as JSON."""
    from graphql import value_from_ast_untyped

    known = {name: value_from_ast_untyped(value) for name, value in operation.defaults} | dict(variables)
    for field in operation.fields:
        if field.name != "__typename":
            values = {argument.name.value: value_from_ast_untyped(argument.value, known) for argument in field.arguments}
            yield Mutation(field.name, values, field.key, field.has_selection)


def values_by_key(value: Any, keys: Sequence[str]) -> Iterator[Any]:
    """Yield every value below one of these keys in nested JSON.

    Iterative, because clients choose the depth.
    """
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, Mapping):
            for key, each in current.items():
                if key in keys:
                    yield each
                waiting.append(each)
        elif isinstance(current, list | tuple):
            waiting.extend(current)
