"""Which chat template of a tokenizer is asked: some have one by name for each use, such as those of Hermes and Command R."""

from collections.abc import Mapping
from typing import Any

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import TokenizeParameters
from recipes.preparation.conversation import ChatTemplate

Templates = str | dict[str, str] | None
"""The only one, or all by their names."""
DEFAULT, WITH_TOOLS = "default", "tool_use"


def template_of(
    templates: Templates,
    special: Mapping[str, Any],
    parameters: TokenizeParameters,
    around: tuple[str, str] | None = None,
    *,
    tools: bool = False,
) -> ChatTemplate:
    """A tokenizer's template as a preparation asks for it, for conversations with tools or without."""
    template = chosen(templates, tools)
    end_token = str(special["eos_token"])
    return ChatTemplate(template, special, parameters.template_arguments, parameters.system_prompt, end_token, around)


def chosen(templates: Templates, tools: bool) -> str | None:
    """As transformers chooses (`get_chat_template`).

    Raises:
        BadConfiguration: there are several, and none is the default.
    """
    if not isinstance(templates, dict):
        return templates
    for name in (WITH_TOOLS, DEFAULT) if tools else (DEFAULT,):
        if name in templates:
            return templates[name]
    raise BadConfiguration(
        f"the tokenizer has several chat templates ({', '.join(sorted(templates))}), and none is called '{DEFAULT}': "
        "set its `chat_template` to the one that is wanted, save it into a folder, and name that folder"
    )
