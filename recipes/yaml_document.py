"""A YAML file as a document, unless a few lines of it stand for more than a machine can hold ("billion laughs").

PyYAML itself reads such a file at once: what an alias names is there once, however often it is named. Whoever walks through
the document, or writes it as JSON, meets it again and again.
"""

import math
import re
from typing import Any

import yaml

LONGEST = 1_000_000
"""Characters; a configuration has a few thousand."""


NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))$"
        r"|\.(?:nan|NaN|NAN)$"
    ),
}
"""How a number is written, by its tag: as PyYAML has it, but for what YAML 1.2 has not."""


class Loader(yaml.SafeLoader):
    """PyYAML's, for which `1:30` is no number of sixties (90), and `010` not 8."""

    yaml_implicit_resolvers = {
        first: [(tag, NUMBERS.get(tag, pattern)) for tag, pattern in rules]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class TooLong(yaml.YAMLError):
    """Its message shows nothing of the document."""


def yaml_document(text: str) -> Any:
    """As `yaml.safe_load`, but for `1:30` and `010`.

    Raises `TooLong`, a YAMLError, where the document is too long, its aliases written out.
    """
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if written_out(node, {}) > LONGEST:
            raise TooLong(
                f"with what its aliases (*NAME) stand for, it is longer than {LONGEST:,} characters: write out what you need"
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def written_out(node: yaml.Node, known: dict[int, float]) -> float:
    """About as many characters as it takes without aliases; no end where it holds itself. `known` is of nodes, by `id`."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(written_out(part, known) for part in inner)
    return known[id(node)]
