"""Chat templates of a model folder as exported for the engine, with values from training."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, Keys

from recipes.contracts.job import BadConfiguration
from recipes.export.model_json import read_json
from recipes.preparation.tokenization.chat_template import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from recipes.records.conversation import SYSTEM_ROLES

SERVED_TEMPLATES = (DEFAULT_TEMPLATE, TOOL_TEMPLATE)
"""Templates that llama.cpp renders: the second for requests with tools."""
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
"""Folder of named templates such as `tool_use`, one file each."""
VARIABLE = re.compile(r"[A-Za-z_]\w*")


def read_chat_templates(model_dir: Path) -> dict[str, str]:
    """Read the templates by name, sorted.

    As in transformers, files override the configuration.
    """
    file = model_dir / TEMPLATE_FILE
    found = {DEFAULT_TEMPLATE: file.read_text(encoding="utf-8")} if file.is_file() else {}
    found |= {path.stem: path.read_text(encoding="utf-8") for path in (model_dir / TEMPLATES_FOLDER).glob("*.jinja")}
    if not found:
        found = named_templates(read_json(model_dir / "tokenizer_config.json").get("chat_template"))
    return dict(sorted(found.items()))


def named_templates(stated: Any) -> dict[str, str]:
    """Return the templates in `chat_template` of a tokenizer's configuration: one, or several by name."""
    if isinstance(stated, str):
        return {DEFAULT_TEMPLATE: stated}
    if isinstance(stated, dict):
        return {str(name): str(template) for name, template in stated.items()}
    return {str(each["name"]): str(each["template"]) for each in stated or ()}


def add_training_values(
    templates: Mapping[str, str], system_prompt: str | None, arguments: Mapping[str, Any]
) -> dict[str, str]:
    """Add training's default system prompt and variables to the templates that the engine renders.

    Raises:
        BadConfiguration: a variable's name is invalid in a template.
    """
    if invalid := next((name for name in arguments if not VARIABLE.fullmatch(name)), None):
        raise BadConfiguration(
            f"tokenize.template_arguments: '{invalid}' is not a variable name, so the engine's template cannot set it"
        )
    lines = [f"{{% set {name} = {to_jinja(value)} %}}\n" for name, value in sorted(arguments.items())]
    if system_prompt is not None:
        message = to_jinja([{"role": "system", "content": system_prompt}])
        asked = f"messages if messages and messages[0]['role'] in {to_jinja(SYSTEM_ROLES)} else {message} + messages"
        lines.append(f"{{% set messages = {asked} %}}\n")
    # Each line is a block tag, whose newline is not rendered, so that the output stays unchanged.
    before = "".join(lines)
    return {name: before + text if name in SERVED_TEMPLATES else text for name, text in templates.items()}


def to_jinja(value: Any) -> str:
    """Convert a JSON value to a Jinja literal."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_jinja(str(key))}: {to_jinja(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_jinja, value)) + "]"
    return json.dumps(value) if value is not None else "none"


def check_served(templates: Mapping[str, str], model_dir: Path) -> None:
    """Raise BadConfiguration if the engine renders none of several templates, but a built-in one."""
    if templates and not any(name in templates for name in SERVED_TEMPLATES):
        raise BadConfiguration(
            f"{model_dir}: the engine renders none of the chat templates {', '.join(templates)}: "
            f"rename the right one to '{DEFAULT_TEMPLATE}'"
        )


def unserved_names(templates: Iterable[str]) -> list[str]:
    return [name for name in templates if name not in SERVED_TEMPLATES]


def write_chat_templates(writer: GGUFWriter, templates: Mapping[str, str]) -> None:
    """Add templates to the metadata of a GGUF file, sorted by name.

    The library's order is that of a set.

    Raises:
        BadConfiguration: two names are equal in GGUF, which allows only letters and digits.
    """
    others = {re.sub(r"[^A-Za-z0-9]", "_", name): name for name in sorted(templates) if name != DEFAULT_TEMPLATE}
    if len(others) < len(templates) - (DEFAULT_TEMPLATE in templates) or DEFAULT_TEMPLATE in others:
        raise BadConfiguration(f"the names of the chat templates {', '.join(sorted(templates))} are not distinct in GGUF")
    for key, name in others.items():
        writer.add_string(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=key), templates[name])
    if others:
        writer.add_array(Keys.Tokenizer.CHAT_TEMPLATES, list(others))
    if DEFAULT_TEMPLATE in templates:
        writer.add_chat_template(templates[DEFAULT_TEMPLATE])
