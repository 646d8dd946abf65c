"""Read the configuration as a document: expand `${VAR}`, apply `HANZO_ML_{SECTION}_{KEY}`.

Values may be secrets, so no message of this module contains one: it names files by line and column, and values by key.
"""

import errno
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from recipes.contracts.job import BadConfiguration
from recipes.contracts.validation_errors import explain_unknown_key, list_known_keys, suggest_spelling
from recipes.contracts.yaml_reader import DocumentTooLong, load_yaml

VARIABLE_PREFIX = "HANZO_ML_"
RESERVED_VARIABLES = {"HOME", "CONFIG", "TRACKING_URI", "EXPERIMENT"} | {
    "RUN_ID",
    "JOB_ID",
    "DATASETS",
    "CHECKPOINTS",
    "CHECKPOINT_INTERVAL",
}
"""Variables that are no settings: state folder, configuration file, two of the client, and those of a command job."""


def find_configuration(home: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the configuration file, if there is one."""
    if named := environ.get("HANZO_ML_CONFIG"):
        if not Path(named).is_file():
            raise BadConfiguration(f"HANZO_ML_CONFIG is {named}, but there is no such file: correct or unset the variable")
        return Path(named)
    candidates = (home / "config.yaml", Path("/etc/hanzo-ml/config.yaml"))
    return next((path for path in candidates if path.is_file()), None)


def read_configuration(path: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read a configuration file and replace every `${VAR}`."""
    try:
        document = load_yaml(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError:
        raise BadConfiguration(f"{path} is not UTF-8: save it in that encoding") from None
    except DocumentTooLong as error:
        raise BadConfiguration(f"{path} is not valid YAML: {error}") from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: an invalid date, or a number that is too long
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadConfiguration(f"{path}{where}: not valid YAML") from None
    if not isinstance(document, dict):
        raise BadConfiguration(f"{path} must be a mapping of sections such as 'server' and 'storage'")
    expanded = expand_variables(document, path, environ)
    assert isinstance(expanded, dict)
    return expanded


def expand_variables(value: Any, path: Path, environ: Mapping[str, str]) -> Any:
    """Replace `${VAR}` in every string value of a document.

    This happens after parsing, so that no value can add structure.
    """

    def variable(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in environ:
            raise BadConfiguration(f"{path} uses ${{{name}}}, but the environment variable {name} is not set")
        return environ[name]

    if isinstance(value, dict):
        return {key: expand_variables(item, path, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_variables(item, path, environ) for item in value]
    if isinstance(value, str):
        return re.sub(r"\$\{(\w+)\}", variable, value)
    return value


def apply_override(
    document: dict[str, Any], sections: Mapping[str, type[BaseModel]], name: str, value: str
) -> tuple[str, ...]:
    """Put the variable `HANZO_ML_{SECTION}_{KEY}` into the document; return its path."""
    section, _, key = name.removeprefix(VARIABLE_PREFIX).lower().partition("_")
    if section not in sections or not key:
        raise BadConfiguration(f"unknown variable {name}: it must be HANZO_ML_SECTION_KEY with a section of config.yaml")
    fields = sections[section].model_fields
    target = ensure_section(document, section)
    path_in_document: tuple[str, ...] = (section,)
    if nested := re.match(r"buckets_(\w+)", key) if section == "storage" else None:
        buckets = fields["buckets"].annotation
        assert isinstance(buckets, type) and issubclass(buckets, BaseModel)
        fields, target, path_in_document, key = (
            buckets.model_fields,
            ensure_section(target, "buckets"),
            (section, "buckets"),
            nested.group(1),
        )
    if key not in fields:
        meant = suggest_spelling(key, fields)
        hint = f": did you mean '{meant}'?" if meant else ""
        raise BadConfiguration(f"unknown variable {name}: section '{section}' has no key '{key}'{hint}")
    is_list = "tuple" in str(fields[key].annotation)
    target[key] = [item.strip() for item in value.split(",")] if is_list else value
    return (*path_in_document, key)


def ensure_section(document: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a section of the document; create it if it is missing or null."""
    if document.get(key) is None:
        document[key] = {}
    found = document[key]
    if not isinstance(found, dict):
        raise BadConfiguration(f"'{key}' must be a mapping of keys to values")
    return found


def describe_validation_error(error: ValidationError, kind: type[BaseModel]) -> str:
    """Describe the first problem in one line, without the input, which may be a secret."""
    problem = error.errors(include_input=False)[0]
    where = " ".join(".".join(str(part) for part in problem["loc"]).split())
    if problem["type"] == "extra_forbidden":
        return explain_unknown_key(where, list_known_keys(kind, problem["loc"][:-1]))
    message = problem["msg"].removeprefix("Value error, ")
    return f"'{where}': {message}" if where else message


def home_folder_error(error: OSError) -> BadConfiguration:
    """Explain why the state folder cannot be created or written.

    An error without a file name is returned with its own message.
    """
    if error.filename is None:
        return BadConfiguration(str(error))
    is_full = error.errno == errno.ENOSPC
    instead = "free some of that disk" if is_full else "set HANZO_ML_HOME to a folder that this user may write to"
    return BadConfiguration(f"{error.filename}: {error.strerror}: {instead}")


def mask_address(address: str) -> str:
    """Return an address without user and password."""
    return re.sub(r"^(.*?://)?.*@", r"\1***@", address)
