"""Names that the running product exposes, to compare with the frozen ones.

`tests/support/stable_names.py` holds the frozen names. They are read from the command line, HTTP, the migrated
database, Dagster's definitions and the source's literals, and hardly ever from a module's objects: a module may move
without a change here.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sqlite3
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("recipes", "resources", "hanzo_ml_assets", "sensors", "api", "hanzo_ml")
Groups = dict[str, tuple[str, ...]]


def commands() -> Groups:
    """Return each command with its options and arguments."""
    import typer.main

    from hanzo_ml.cli import app

    return dict(walk_commands(typer.main.get_command(app), ()))


def walk_commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from walk_commands(child, (*path, name))
        return
    names = (option for parameter in command.params for option in spellings(parameter))
    yield " ".join(path), tuple(sorted(names))


def spellings(parameter: Any) -> list[str]:
    options = [*parameter.opts, *parameter.secondary_opts]
    return [parameter.metavar or parameter.name.upper()] if parameter.param_type_name == "argument" else options


def operations(document: Mapping[str, Any]) -> dict[str, str]:
    """Return each operation id with its method and path."""
    return {
        operation["operationId"]: f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def schemas(document: Mapping[str, Any]) -> Groups:
    """Return each schema with its JSON keys."""
    return {name: tuple(sorted(schema.get("properties", {}))) for name, schema in document["components"]["schemas"].items()}


def schema_values(document: Mapping[str, Any]) -> Groups:
    """Return the allowed values of each key of a schema."""
    return {
        f"{name}.{key}": tuple(sorted(set(enumerated(schema))))
        for name, whole in document["components"]["schemas"].items()
        for key, schema in whole.get("properties", {}).items()
        if enumerated(schema)
    }


def enumerated(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [value for each in schema for value in enumerated(each)]
    if not isinstance(schema, dict):
        return []
    own = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
    return [value for value in own if isinstance(value, str)] + [
        value for key, each in schema.items() if key not in ("enum", "const", "properties") for value in enumerated(each)
    ]


def tables(database: Path) -> Groups:
    """Return each table with its columns."""
    with closing(sqlite3.connect(database)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            name: tuple(column for _, column, *_ in connection.execute(f"PRAGMA table_info('{name}')"))
            for name in sorted(names)
            if not name.startswith("sqlite_")
        }


def migrations() -> tuple[str, ...]:
    files = sorted(ROOT.glob("resources/**/migrations/versions/*.py"))
    return tuple(found for file in files for found in re.findall(r'^revision(?:: str)? = "(.+)"', file.read_text(), re.M))


def keys_of(document: Any, path: str = "") -> Iterator[str]:
    """Return the dotted keys of nested mappings."""
    if isinstance(document, dict) and document:
        for key, value in document.items():
            yield from keys_of(value, f"{path}.{key}" if path else key)
    else:
        yield path


@dataclass(frozen=True)
class Graph:
    """Names in the code location that Dagster stores."""

    assets: tuple[str, ...]
    checks: tuple[str, ...]
    sensors: tuple[str, ...]
    partitions: tuple[str, ...]
    pools: tuple[str, ...]
    groups: tuple[str, ...]


def graph() -> Graph:
    from hanzo_ml_assets.definitions import definitions

    repository = definitions().get_repository_def()
    nodes = [repository.asset_graph.get(key) for key in repository.asset_graph.get_all_asset_keys()]
    partitions = {node.partitions_def.name for node in nodes if node.partitions_def is not None}
    return Graph(
        assets=tuple(sorted(node.key.to_user_string() for node in nodes)),
        checks=tuple(sorted(key.to_user_string() for key in repository.asset_graph.asset_check_keys)),
        sensors=tuple(sorted(sensor.name for sensor in repository.sensor_defs)),
        partitions=tuple(sorted(partitions)),
        pools=tuple(sorted({pool for node in nodes for pool in node.pools or ()})),
        groups=tuple(sorted({node.group_name for node in nodes if node.group_name})),
    )


def python_api() -> dict[str, str]:
    """Return the functions of `hanzo_ml` with their parameters and defaults, without types."""
    module = importlib.import_module("hanzo_ml")
    return {name: parameters_of(getattr(module, name)) for name in module.__all__}


def parameters_of(function: Any) -> str:
    found = inspect.signature(function).parameters.values()
    return str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in found]))


def members_of(owner: type) -> dict[str, str]:
    """Return public methods and attributes of a class that users derive from or hold."""
    public = {name: member for name, member in vars(owner).items() if not name.startswith("_") or name == "__init__"}
    return {name: parameters_of(member) if callable(member) else "" for name, member in public.items()}


def console_scripts() -> dict[str, str]:
    scripts: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return scripts


def resolves(address: str) -> bool:
    """Return whether `module:attribute` can be imported."""
    module, _, attribute = address.partition(":")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def is_program(module: str) -> bool:
    """Return whether `python -m` can start a module, without importing it.

    Some modules start work on import.
    """
    try:
        found = importlib.util.find_spec(module)
        if found and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        return False
    if found is None or found.origin is None:
        return False
    return (
        module.endswith("__main__")
        or "__main__" in found.origin
        or '__name__ == "__main__"' in Path(found.origin).read_text()
    )


@dataclass(frozen=True)
class Source:
    """Declarations of the product's source, independent of the module.

    `literals` are string constants, constant parts of f-strings and keywords as of `dict(key=...)`; `numbers` are
    integers that have a name; `fields` are those of each class; `values` are the strings of each enum, tuple, list, set
    and `Literal[...]` and the keys of each dictionary.
    """

    literals: frozenset[str]
    numbers: frozenset[int]
    fields: tuple[tuple[str, frozenset[str]], ...]
    values: frozenset[frozenset[str]]


@cache
def source() -> Source:
    literals: set[str] = set()
    numbers: set[int] = set()
    fields: list[tuple[str, frozenset[str]]] = []
    values: set[frozenset[str]] = set()
    for node in nodes():
        match node:
            case ast.Constant(value=str(text)):
                literals.add(text)
            case ast.keyword(arg=str(name)):
                literals.add(name)
            case ast.Assign(value=ast.Constant(value=int(number))) | ast.AnnAssign(value=ast.Constant(value=int(number))):
                numbers.add(number)
            case ast.ClassDef(name=name, body=body):
                fields.append((name, frozenset(fields_of(body))))
                values.add(strings_of(each.value for each in body if isinstance(each, ast.Assign)))
            case ast.Dict(keys=members) | ast.Tuple(elts=members) | ast.List(elts=members) | ast.Set(elts=members):
                values.add(strings_of(members))
    return Source(frozenset(literals), frozenset(numbers), tuple(fields), frozenset(values))


def nodes() -> Iterator[ast.AST]:
    for folder in PRODUCT:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield from ast.walk(ast.parse(file.read_bytes()))


def fields_of(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Return the fields of a Pydantic class or dataclass, by JSON alias if any."""
    for each in body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield alias_of(each.value) or each.target.id


def alias_of(default: ast.expr | None) -> str | None:
    keywords = default.keywords if isinstance(default, ast.Call) else []
    aliases = ("alias", "serialization_alias", "validation_alias")
    found = (key.value.value for key in keywords if key.arg in aliases and isinstance(key.value, ast.Constant))
    return next(map(str, found), None)


def strings_of(members: Iterable[ast.expr | None]) -> frozenset[str]:
    return frozenset(each.value for each in members if isinstance(each, ast.Constant) and isinstance(each.value, str))
