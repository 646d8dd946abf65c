"""A YAML file of one mapping, as people write recipes, jobs and sweeps."""

from pathlib import Path
from typing import Any

from recipes.contracts.job import BadConfiguration
from recipes.yaml_document import yaml_document
from recipes.yaml_lines import NO_YAML, key_of_no_text, repeated_key, why_no_yaml


def read_mapping(path: Path, example: str = "") -> tuple[str, dict[str, Any]]:
    """The text of a file, and what it says. `example` is where people see one.

    Raises:
        BadConfiguration: it is no YAML in UTF-8, or no mapping, has a key twice, of which YAML takes the last and says
            nothing, or one that is true or none to YAML; the message names the file, and the line where there is one.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document, repeated = yaml_document(text), repeated_key(text)
    except UnicodeDecodeError as error:
        ends = error.object[: error.start].count(b"\n") + 1
        raise BadConfiguration(f"{path}, line {ends} is not UTF-8: save it as UTF-8") from None
    except NO_YAML as error:
        raise BadConfiguration(f"{path}{why_no_yaml(error, text)}") from None
    if repeated:
        raise BadConfiguration(f"{path}, line {repeated[1]}: '{repeated[0]}' is there already: keep one of the two")
    if not isinstance(document, dict):
        found = "is empty" if document is None else "must be a mapping"
        raise BadConfiguration(f"{path} {found}: write lines of `KEY: VALUE`{example and f', as {example}'}")
    if odd := key_of_no_text(text):
        raise BadConfiguration(f"{path}, line {odd[1]}: the key `{odd[0]}` is no text in YAML: put it in quotes")
    return text, document
