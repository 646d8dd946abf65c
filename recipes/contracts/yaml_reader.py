"""Read YAML files safely, and find the line of an error."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from recipes.contracts.job import BadConfiguration

# A YAML file as a document, unless a few lines of it stand for more than a machine can hold ("billion laughs").
#
# PyYAML itself reads such a file at once: what an alias names is there once, however often it is named. Whoever walks
# through the document, or writes it as JSON, meets it again and again.

MAX_CHARACTERS = 1_000_000
"""Characters; a configuration has a few thousand."""


NUMBER_PATTERNS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))$"
        r"|\.(?:nan|NaN|NAN)$"
    ),
}
"""How a number is written, by its tag: as PyYAML has it, but for what YAML 1.2 has not."""


class StrictLoader(yaml.SafeLoader):
    """PyYAML's, for which `1:30` is no number of sixties (90), and `010` not 8."""

    yaml_implicit_resolvers = {
        first: [(tag, NUMBER_PATTERNS.get(tag, pattern)) for tag, pattern in rules]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class DocumentTooLong(yaml.YAMLError):
    """Its message shows nothing of the document."""


def load_yaml(text: str) -> Any:
    """As `yaml.safe_load`, but for `1:30` and `010`.

    Raises `DocumentTooLong`, a YAMLError, where the document is too long, its aliases written out.
    """
    loader = StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if count_expanded_characters(node, {}) > MAX_CHARACTERS:
            raise DocumentTooLong(
                f"with what its aliases (*NAME) stand for, it is longer than {MAX_CHARACTERS:,} characters: write out "
                "what you need"
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def count_expanded_characters(node: yaml.Node, known: dict[int, float]) -> float:
    """About as many characters as it takes without aliases; no end where it holds itself. `known` is of nodes, by `id`."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(count_expanded_characters(part, known) for part in inner)
    return known[id(node)]


TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
"""How YAML tags a key that is one; `<<` is none, and takes in the keys of another mapping."""
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises of a text that it cannot read; ValueError of a date that is none, or a number that has no end."""


def find_line(text: str, location: Sequence[Any]) -> int | None:
    """The line, from 1, of the deepest key of `location` that the document has; none where it has not even the first.

    `location` is the `loc` of a Pydantic error: keys of mappings and places in lists. `text` is valid YAML.
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
    """The first key that a message names and the document has, such as `hardware.gpus`: what is wrong between keys has no
    place of its own.
    """
    keys = document if isinstance(document, dict) else {}
    for name in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message):
        parts = tuple(name.split("."))
        if parts[0] in keys:
            return parts
    return ()


def find_repeated_key(text: str) -> tuple[str, int] | None:
    """The first key that a mapping has twice, with its line: YAML takes the last one and says nothing."""
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
    """The first key that YAML takes for something else than a text, such as `yes` for true, with its line."""
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
    """What to say behind a file's name of a text of which PyYAML raised one of `YAML_ERRORS`: the line where it is known,
    why, and what to do about a tab.
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
        line, message = find_unreadable_line(text), message.partition(";")[0]  # behind it is what a program could do
    elif isinstance(error, RecursionError):
        message = "it is nested too deep"
    place = f", line {line}" if line else ""
    hint = ": use spaces instead" if "'\\t'" in message else ""
    return f"{place} is not valid YAML: {' '.join(message.split())}{hint}"


def find_unreadable_line(text: str) -> int | None:
    """The line of the first value that looks like one of a kind, and is none."""
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
    """The text of a file, and what it says. `example` is where people see one.

    Raises:
        BadConfiguration: it is no YAML in UTF-8, or no mapping, has a key twice, of which YAML takes the last and says
            nothing, or one that is true or none to YAML; the message names the file, and the line where there is one.
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
        raise BadConfiguration(f"{path}, line {repeated[1]}: '{repeated[0]}' is there already: keep one of the two")
    if not isinstance(document, dict):
        found = "is empty" if document is None else "must be a mapping"
        raise BadConfiguration(f"{path} {found}: write lines of `KEY: VALUE`{example and f', as {example}'}")
    if odd := find_non_text_key(text):
        raise BadConfiguration(f"{path}, line {odd[1]}: the key `{odd[0]}` is no text in YAML: put it in quotes")
    return text, document
