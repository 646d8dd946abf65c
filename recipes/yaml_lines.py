"""On which line of a YAML file a key stands, so that a refusal can name it."""

import re
from collections.abc import Sequence
from typing import Any

import yaml


def line_of(text: str, where: Sequence[Any]) -> int | None:
    """The line, from 1, of the deepest key of `where` that the document has; none where it has not even the first.

    `where` is the `loc` of a Pydantic error: keys of mappings and places in lists. `text` is valid YAML.
    """
    node, line = yaml.compose(text, Loader=yaml.SafeLoader), None
    for part in where:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def named_in(message: str, document: object) -> tuple[str, ...]:
    """The first key that a message names and the document has, such as `hardware.gpus`: what is wrong between keys has no
    place of its own.
    """
    keys = document if isinstance(document, dict) else {}
    for name in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message):
        parts = tuple(name.split("."))
        if parts[0] in keys:
            return parts
    return ()


def repeated_key(text: str) -> tuple[str, int] | None:
    """The first key that a mapping has twice, with its line: YAML takes the last one and says nothing."""
    pending = [yaml.compose(text, Loader=yaml.SafeLoader)]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if key.value in seen:
                    return str(key.value), key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode):
                    seen.add(key.value)
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value
    return None
