"""How much a GraphQL document may ask for, before anything of it is looked up: MLflow's limits, in MLflow's words."""

from collections.abc import Iterator, Mapping

from graphql import (
    DocumentNode,
    FieldNode,
    FragmentDefinitionNode,
    FragmentSpreadNode,
    InlineFragmentNode,
    OperationDefinitionNode,
    SelectionNode,
    SelectionSetNode,
)

MAX_ROOT_FIELDS = 10
MAX_ALIASES = 10
"""Of one level: each alias asks for the same thing once more."""
MAX_DEPTH = 10
MAX_SELECTIONS = 1000

Fragments = Mapping[str, FragmentDefinitionNode]


def too_much(document: DocumentNode) -> str | None:
    """What a document asks too much of. A fragment counts wherever it is spread, and one within itself ends at the depth."""
    nodes = document.definitions
    fragments = {node.name.value: node for node in nodes if isinstance(node, FragmentDefinitionNode)}
    levels = [(node.selection_set, 1) for node in nodes if isinstance(node, OperationDefinitionNode)]
    roots = aliases = selections = 0
    while levels:
        level, depth = levels.pop()
        if depth > MAX_DEPTH:
            return f"Query exceeds maximum depth of {MAX_DEPTH}"
        fields = list(fields_of(level, fragments))
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


def fields_of(level: SelectionSetNode, fragments: Fragments) -> Iterator[FieldNode]:
    """The fields of one level, those of its fragments among them: each named fragment is looked into once."""
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
