"""On which line of a YAML file a key stands, so that a refusal can name it."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from recipes.yaml_document import Loader

TEXTS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
"""How YAML tags a key that is one; `<<` is none, and takes in the keys of another mapping."""
NO_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises of a text that it cannot read; ValueError of a date that is none, or a number that has no end."""


def line_of(text: str, where: Sequence[Any]) -> int | None:
    """The line, from 1, of the deepest key of `where` that the document has; none where it has not even the first.

    `where` is the `loc` of a Pydantic error: keys of mappings and places in lists. `text` is valid YAML.
    """
    node, line = yaml.compose(text, Loader=Loader), None
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
    pending = [yaml.compose(text, Loader=Loader)]
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


def key_of_no_text(text: str) -> tuple[str, int] | None:
    """The first key that YAML takes for something else than a text, such as `yes` for true, with its line."""
    loader = Loader(text)
    pending, found = [loader.get_single_node()], []
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            found += [(key.start_mark.line + 1, key.value) for key, _ in node.value if key.tag not in TEXTS]
            pending += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value
    line, key = min(found, default=(0, ""))
    return (key, line) if line else None


def why_no_yaml(error: Exception, text: str) -> str:
    """What to say behind a file's name of a text of which PyYAML raised one of `NO_YAML`: the line where it is known, why,
    and what to do about a tab.
    """
    line: int | None = None
    words = str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line, words = mark.line + 1 if mark else None, error.problem or words
    elif isinstance(error, yaml.reader.ReaderError):
        line, words = (
            text[: error.position].count("\n") + 1,
            f"the character #x{ord(text[error.position]):04x} is not allowed",
        )
    elif isinstance(error, ValueError):
        line, words = unreadable(text), words.partition(";")[0]  # behind it is what a program could do
    elif isinstance(error, RecursionError):
        words = "it is nested too deep"
    place = f", line {line}" if line else ""
    hint = ": use spaces instead" if "'\\t'" in words else ""
    return f"{place} is not valid YAML: {' '.join(words.split())}{hint}"


def unreadable(text: str) -> int | None:
    """The line of the first value that looks like one of a kind, and is none."""
    loader = Loader(text)
    pending = [loader.get_single_node()]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.ScalarNode):
            try:
                loader.construct_object(node)  # type: ignore[no-untyped-call]
            except ValueError:
                return int(node.start_mark.line) + 1
        elif isinstance(node, yaml.MappingNode):
            pending += [part for pair in reversed(node.value) for part in reversed(pair)]
        elif isinstance(node, yaml.SequenceNode):
            pending += reversed(node.value)
    return None
