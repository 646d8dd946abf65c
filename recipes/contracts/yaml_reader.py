"""Read YAML files safely, and find the line of an error."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from recipes.contracts.job import BadConfiguration

# Reject YAML whose aliases expand to more than memory can hold ("billion laughs").
#
# PyYAML itself reads such a file quickly, because each alias refers to a shared object. Code that walks the document, or
# serializes it to JSON, expands it.

MAX_CHARACTERS = 1_000_000
"""Maximum expanded size in characters; a configuration has a few thousand."""


NUMBER_PATTERNS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))$"
        r"|\.(?:nan|NaN|NAN)$"
    ),
}
"""Number syntax by tag: PyYAML's without what YAML 1.2 removed."""


class StrictLoader(yaml.SafeLoader):
    """PyYAML's loader without sexagesimal (`1:30` is 90) and octal (`010` is 8) numbers."""

    yaml_implicit_resolvers = {
        first: [(tag, NUMBER_PATTERNS.get(tag, pattern)) for tag, pattern in rules]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class DocumentTooLong(yaml.YAMLError):
    """The expanded document is too long; the message contains none of it."""


def load_yaml(text: str) -> Any:
    """Like `yaml.safe_load`, but with `StrictLoader`.

    Raises:
        DocumentTooLong: a YAMLError; the document is too long after expanding its aliases.
    """
    loader = StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if count_expanded_characters(node, {}) > MAX_CHARACTERS:
            raise DocumentTooLong(
                f"with its aliases (*NAME) expanded, it is longer than {MAX_CHARACTERS:,} characters: shorten it, or remove "
                "aliases"
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def count_expanded_characters(node: yaml.Node, known: dict[int, float]) -> float:
    """Estimate the length with aliases expanded, infinite for a cycle.

    `known` caches results by node `id`.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(count_expanded_characters(part, known) for part in inner)
    return known[id(node)]


TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
"""Tags of text keys; `<<` merges another mapping."""
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""Errors of PyYAML for invalid text; ValueError for invalid dates and infinite numbers."""


def find_line(text: str, location: Sequence[Any]) -> int | None:
    """Return the line, from 1, of the deepest key in `location`; None without the first.

    `location` is the `loc` of a Pydantic error: mapping keys and list indices. `text` is valid YAML.
    """
    node, line = yaml.compose(text, Loader=StrictLoader), None
    for part in location:
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


def find_named_key(message: str, document: object) -> tuple[str, ...]:
    """Return the first key in a message that the document has, such as `hardware.gpus`.

    Errors between several keys have no location of their own.
    """
    keys = document if isinstance(document, dict) else {}
    for name in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message):
        parts = tuple(name.split("."))
        if parts[0] in keys:
            return parts
    return ()


def find_repeated_key(text: str) -> tuple[str, int] | None:
    """Return the first duplicate key with its line; PyYAML silently uses the last value."""
    pending = [yaml.compose(text, Loader=StrictLoader)]
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


def find_non_text_key(text: str) -> tuple[str, int] | None:
    """Return the first key that YAML does not read as text, and its line.

    For example, `yes` is true.
    """
    loader = StrictLoader(text)
    pending, found = [loader.get_single_node()], []
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            found += [(key.start_mark.line + 1, key.value) for key, _ in node.value if key.tag not in TEXT_TAGS]
            pending += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value
    line, key = min(found, default=(0, ""))
    return (key, line) if line else None


def explain_yaml_error(error: Exception, text: str) -> str:
    """Return what follows the file name in the message for one of `YAML_ERRORS`.

    It contains the line if known, the reason, and advice about tabs.
    """
    line: int | None = None
    message = str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line, message = mark.line + 1 if mark else None, error.problem or message
    elif isinstance(error, yaml.reader.ReaderError):
        line, message = (
            text[: error.position].count("\n") + 1,
            f"the character #x{ord(text[error.position]):04x} is not allowed",
        )
    elif isinstance(error, ValueError):
        line, message = find_unreadable_line(text), message.partition(";")[0]  # what follows is advice for programmers
    elif isinstance(error, RecursionError):
        message = "it is nested too deeply"
    place = f", line {line}" if line else ""
    hint = ": use spaces instead" if "'\\t'" in message else ""
    return f"{place} is not valid YAML: {' '.join(message.split())}{hint}"


def find_unreadable_line(text: str) -> int | None:
    """Return the line of the first value that fails to convert to its type."""
    loader = StrictLoader(text)
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


def read_yaml_mapping(path: Path, example: str = "") -> tuple[str, dict[str, Any]]:
    """Read a YAML file and return its text and content.

    `example` names a source of examples for messages.

    Raises:
        BadConfiguration: it is not YAML in UTF-8, not a mapping, has duplicate keys, of which PyYAML silently uses the last,
            or keys that are not text; the message contains the file and the line, if there is one.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document, repeated = load_yaml(text), find_repeated_key(text)
    except UnicodeDecodeError as error:
        ends = error.object[: error.start].count(b"\n") + 1
        raise BadConfiguration(f"{path}, line {ends} is not UTF-8: save it as UTF-8") from None
    except YAML_ERRORS as error:
        raise BadConfiguration(f"{path}{explain_yaml_error(error, text)}") from None
    if repeated:
        raise BadConfiguration(f"{path}, line {repeated[1]}: '{repeated[0]}' is a duplicate: keep one of the two")
    if not isinstance(document, dict):
        found = "is empty" if document is None else "must be a mapping"
        raise BadConfiguration(f"{path} {found}: write lines of `KEY: VALUE`{example and f', as {example}'}")
    if odd := find_non_text_key(text):
        raise BadConfiguration(f"{path}, line {odd[1]}: the key `{odd[0]}` is not a text in YAML: put it in quotes")
    return text, document
