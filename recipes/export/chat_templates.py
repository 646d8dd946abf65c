"""The chat templates of a model folder as the engine gets them: all by name, with what a training puts before each."""

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
"""Names of the templates that llama.cpp renders: the second for requests with tools."""
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
"""The templates that have a name, such as `tool_use`, a file each."""
VARIABLE = re.compile(r"[A-Za-z_]\w*")


def read_chat_templates(model_dir: Path) -> dict[str, str]:
    """The templates by name, in the order of their names, as transformers finds them: files replace the configuration."""
    file = model_dir / TEMPLATE_FILE
    found = {DEFAULT_TEMPLATE: file.read_text(encoding="utf-8")} if file.is_file() else {}
    found |= {path.stem: path.read_text(encoding="utf-8") for path in (model_dir / TEMPLATES_FOLDER).glob("*.jinja")}
    if not found:
        found = named_templates(read_json(model_dir / "tokenizer_config.json").get("chat_template"))
    return dict(sorted(found.items()))


def named_templates(stated: Any) -> dict[str, str]:
    """The value `chat_template` of a tokenizer's configuration: one template, or several with names."""
    if isinstance(stated, str):
        return {DEFAULT_TEMPLATE: stated}
    if isinstance(stated, dict):
        return {str(name): str(template) for name, template in stated.items()}
    return {str(each["name"]): str(each["template"]) for each in stated or ()}


def add_training_values(
    templates: Mapping[str, str], system_prompt: str | None, arguments: Mapping[str, Any]
) -> dict[str, str]:
    """The templates with what training gives them besides the conversation: a system prompt where that has none, and
    variables. Those that the engine does not render stay as they are.

    Raises:
        BadConfiguration: a variable that no template can set.
    """
    if invalid := next((name for name in arguments if not VARIABLE.fullmatch(name)), None):
        raise BadConfiguration(
            f"tokenize.template_arguments: '{invalid}' is no name of a variable, which the engine's template could set"
        )
    lines = [f"{{% set {name} = {to_jinja(value)} %}}\n" for name, value in sorted(arguments.items())]
    if system_prompt is not None:
        message = to_jinja([{"role": "system", "content": system_prompt}])
        asked = f"messages if messages and messages[0]['role'] in {to_jinja(SYSTEM_ROLES)} else {message} + messages"
        lines.append(f"{{% set messages = {asked} %}}\n")
    # Each line ends with a block, whose newline is not rendered: nothing of what follows is, or is not, because of it.
    before = "".join(lines)
    return {name: before + text if name in SERVED_TEMPLATES else text for name, text in templates.items()}


def to_jinja(value: Any) -> str:
    """A JSON value as a literal of Jinja."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_jinja(str(key))}: {to_jinja(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_jinja, value)) + "]"
    return json.dumps(value) if value is not None else "none"


def check_served(templates: Mapping[str, str], model_dir: Path) -> None:
    """Raises BadConfiguration where the engine would render none of several templates, but one of its own."""
    if templates and not any(name in templates for name in SERVED_TEMPLATES):
        raise BadConfiguration(
            f"{model_dir}: of the chat templates {', '.join(templates)} the engine renders none: "
            f"call the one that is wanted '{DEFAULT_TEMPLATE}'"
        )


def unserved_names(templates: Iterable[str]) -> list[str]:
    return [name for name in templates if name not in SERVED_TEMPLATES]


def write_chat_templates(writer: GGUFWriter, templates: Mapping[str, str]) -> None:
    """Add templates to the metadata of a GGUF file, in the order of their names: the library's own order is a set's.

    Raises:
        BadConfiguration: two names are the same in a GGUF file, which takes letters and digits alone.
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
