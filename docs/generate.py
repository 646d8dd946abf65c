"""Make docs/cli.md, docs/settings.md and docs/specification.md: `python -m docs.generate`, or `make docs`."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperGroup

from docs.markdown_table import render_table
from docs.specification import render_specification
from hanzo_ml.cli import app
from resources.settings.settings import SECTIONS

FOLDER = Path(__file__).parent
PROGRAM = "hanzo-ml"
CLI_HEADER = """# Command line

This page is made from the code (`make docs`).

`hanzo-ml` speaks HTTP to the server at `HANZO_ML_TRACKING_URI` (default `http://127.0.0.1:8057`), with the bearer token in
`MLFLOW_TRACKING_TOKEN` if there is one. `up`, `down`, `status`, `demo`, `recipe`, `config` and `server` run on this machine,
and so does `job submit --dry-run`, which also asks the server if one answers. `cluster` and `tenant` speak to the Kubernetes
cluster of your kubeconfig. A command that is refused prints one line that begins with `error:` and exits with 1.
"""
SETTINGS_HEADER = """# Settings

This page is made from the code (`make docs`).

Settings are the sections of `config.yaml`. The file is the one that `HANZO_ML_CONFIG` names, else `config.yaml` in the state
folder (`HANZO_ML_HOME`, default `.hanzo-ml`), else `/etc/hanzo-ml/config.yaml`.

- Each key `section.key` is also the variable `HANZO_ML_SECTION_KEY`, which overrides the file. Commas separate the items of
  a list. Of keys with more dots, only `storage.buckets.*` has a variable.
- `${VAR}` in a value of the file is replaced by an environment variable.
- An unknown key is an error.
- `hanzo-ml config show` prints what is in force, with secrets masked.
"""
TYPE_NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "`true`, `false`",
    SecretStr: "text, secret",
    Path: "path",
}
KEY_SUFFIXES: dict[Any, str] = {dict: ".NAME", tuple: "[]"}
"""How a key below a mapping or a list is written."""


def main() -> None:
    for name, text in render_pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def render_pages() -> dict[str, str]:
    """Text of each generated page, by its file name."""
    return {"cli.md": render_cli(), "settings.md": render_settings(), "specification.md": render_specification()}


def render_cli() -> str:
    root = typer.main.get_command(app)
    commands = list(walk_commands(root, (PROGRAM,)))
    contents = [f"- [`{' '.join(path)}`](#{'-'.join(path)}): {first_line(command)}" for path, command in commands]
    parts = [CLI_HEADER, "\n".join(contents), *(render_command(path, command) for path, command in commands)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def walk_commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands that do something, in the order of `--help`."""
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            yield from walk_commands(child, (*path, name))
    else:
        yield path, command


def first_line(command: Any) -> str:
    return inspect.cleandoc(command.help or "").split("\n\n")[0].replace("\n", " ")


def render_command(path: tuple[str, ...], command: Any) -> str:
    arguments = [parameter for parameter in command.params if not is_option(parameter)]
    rows = [render_parameter(parameter) for parameter in command.params if parameter.name != "help"]
    options = ["[OPTIONS]"] if len(rows) > len(arguments) else []
    usage = " ".join([*path, *options, *(f"{name_argument(each)}{'...' * (each.nargs != 1)}" for each in arguments)])
    parts = [f"## {' '.join(path)}", inspect.cleandoc(command.help or ""), f"```text\n{usage}\n```"]
    if rows:
        parts.append(render_table(("argument or option", "values", "default", "what it does"), rows))
    return "\n\n".join(parts)


def is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def name_argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def render_parameter(parameter: Any) -> tuple[str, ...]:
    is_flag = is_option(parameter) and parameter.is_flag
    names = ", ".join(f"`{name}`" for name in parameter.opts) if is_option(parameter) else f"`{name_argument(parameter)}`"
    shown = "" if is_flag or parameter.default in (None, ()) else f"`{parameter.default}`"
    values = "" if is_flag else describe_values(parameter)
    return names, values, "required" if parameter.required else shown, parameter.help or ""


def describe_values(parameter: Any) -> str:
    kind = f"`{parameter.metavar}`" if parameter.metavar else describe_type(parameter.type_descriptor.annotation)
    if parameter.max is not None:
        return f"{kind}, {parameter.min} to {parameter.max}"
    if parameter.min is not None:
        return f"{kind}, at least {parameter.min}"
    return f"{kind}, repeatable" if parameter.multiple else kind


def render_settings() -> str:
    contents = [f"- [`{name}`](#{name})" for name in SECTIONS]
    parts = [SETTINGS_HEADER, "\n".join(contents)]
    for name, section in SECTIONS.items():
        rows = [
            (f"`{key}`", describe_type(field.annotation), describe_default(field), field.description or "")
            for key, field in walk_settings(section, name)
        ]
        parts += [f"## {name}", *section_summary(section), render_table(("key", "values", "default", "what it does"), rows)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def section_summary(section: type[BaseModel]) -> list[str]:
    """Docstring of the section itself; a model without one would inherit pydantic's."""
    text = section.__dict__.get("__doc__")
    return [inspect.cleandoc(text)] if text else []


def walk_settings(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every key below a section. Keys of a mapping and of a list's entries follow the mapping or list itself."""
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}"
        nested, suffix = nested_model(field.annotation)
        if nested is None:
            yield key, field
            continue
        if suffix:
            yield key, field
        yield from walk_settings(nested, key + suffix)


def nested_model(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The model that a key holds, and how a key below it is written: `.NAME` in a mapping, `[]` in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    if suffix := KEY_SUFFIXES.get(get_origin(annotation)):
        for argument in get_args(annotation):
            if isinstance(argument, type) and issubclass(argument, BaseModel):
                return argument, suffix
    return None, ""


def describe_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(describe_type(each) for each in arguments if each is not type(None)))
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return "list"
    if origin is list:
        return describe_type(arguments[0])
    if hasattr(annotation, "__metadata__"):
        return describe_type(annotation.__origin__)
    return TYPE_NAMES.get(annotation, "text")


def describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value in (None, (), {}, PydanticUndefined):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    if isinstance(value, dict):
        value = ", ".join(f"{key}: {each}" for key, each in value.items())
    return f"`{value}`"


if __name__ == "__main__":
    main()
