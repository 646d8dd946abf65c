"""Render chat templates as the serving engine does: sandboxed Jinja with the engine's adjustments.

llama.cpp probes what a template supports and adapts messages: arguments as objects or as JSON text, contents as text or as
lists of parts, and the system message separate or merged into the next one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, Undefined
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from recipes.records.conversation import INT64, Message, parse_arguments

Tools = Sequence[Mapping[str, Any]]
"""Callable tools in the engine's normal form."""

# Numbers in the format of the engine's templates.

NUMBER_MARK = '"<|engine number {}|>"'
NUMBER = re.compile(re.escape(NUMBER_MARK).replace(r"\{\}", "([^|]+)"))
"""Placeholder for a number while the surrounding JSON is serialized."""
UINT64 = 2 * INT64


class EngineNumber(float):
    """A number of a tool or an argument.

    Six significant digits in JSON, six decimals when printed.
    """

    def __str__(self) -> str:
        whole, _, decimals = f"{float(self):f}".partition(".")
        return f"{whole}.{decimals.rstrip('0') or '0'}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def in_json(self) -> str:
        return f"{float(self):g}"


def to_engine_values(value: Any) -> Any:
    """Convert the numbers in a JSON value to the engine's, which are those of C++."""
    if isinstance(value, dict):
        return {key: to_engine_values(held) for key, held in value.items()}
    if isinstance(value, list):
        return [to_engine_values(held) for held in value]
    if isinstance(value, float):
        return EngineNumber(value)
    if isinstance(value, int) and not isinstance(value, bool) and not -INT64 <= value < INT64:
        return value - UINT64 if INT64 <= value < UINT64 else EngineNumber(value)
    return value


def dump_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    """Implement the filter `tojson`."""
    value = None if isinstance(value, Undefined) else value  # templates may ask for tools that are not defined
    marked = mark_numbers(value)
    text = json.dumps(marked, ensure_ascii=ensure_ascii, **form)
    return text if marked is value else NUMBER.sub(r"\1", text)


def mark_numbers(value: Any) -> Any:
    """Replace numbers with text that states their format; json.dumps has one format only.

    Returns the same value if there are none.
    """
    if isinstance(value, EngineNumber):
        return NUMBER_MARK[1:-1].format(value.in_json)
    if isinstance(value, dict):
        marked = {key: mark_numbers(held) for key, held in value.items()}
        return marked if any(marked[key] is not held for key, held in value.items()) else value
    if isinstance(value, list):
        items = [mark_numbers(held) for held in value]
        return items if any(item is not held for item, held in zip(items, value, strict=True)) else value
    return value


# Template syntax.


class GenerationTag(Extension):
    """`{% generation %}` marks learned text; it has no effect on the output."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(template: str) -> Template:
    """Compile a template in a sandbox, because model files are untrusted. Raises TemplateError."""
    language = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        finalize=lambda value: "" if value is None else value,
    )
    language.filters["tojson"] = dump_json  # Jinja's own is for HTML: it escapes more, and sorts keys
    language.globals |= {"raise_exception": raise_template_error, "strftime_now": datetime.now().strftime}
    return language.from_string(template)


def raise_template_error(why: str) -> NoReturn:
    raise TemplateError(why)


# Probes of a template, which determine how messages are adapted.

PROBE = "Pro7be"
ASKED: Message = {"role": "user", "content": "Who?"}
CALLED = {"type": "function", "function": {"name": "keeper", "arguments": {"lamp": PROBE}}, "id": "call00001"}
KNOWN_TOOL = {
    "type": "function",
    "function": {
        "name": "keeper",
        "description": "Who keeps a lamp.",
        "parameters": {"type": "object", "properties": {"lamp": {"type": "string", "description": "Which."}}},
    },
}
KNOWS_DEVELOPER = "<|channel|>"
"""Marker in templates that handle the role `developer`: those of GPT-OSS."""


class EngineTemplate:
    """A template with its variables. Rendering raises the template's errors."""

    def __init__(self, template: str, variables: Mapping[str, Any]) -> None:
        self._source = template
        self._variables = dict(variables)

    def render(self, messages: Sequence[Message], tools: Tools | None = None, *, answer: bool = False) -> str:
        """Render normalized messages and tools; with `answer`, followed by the header of an answer."""
        adapted = [self._adapt_message(message) for message in messages]
        if self.takes_parts_alone:
            parts = ({**message, "content": [{"type": "text", "text": message["content"]}]} for message in adapted)
            adapted = list(parts)
        elif adapted and adapted[0]["role"] == "system" and not self.takes_system_message:
            adapted = merge_system_message(adapted)
        return self._render(adapted, to_engine_values(list(tools)) if tools else None, answer)

    def _render(self, messages: Sequence[Message], tools: Tools | None, answer: bool) -> str:
        # Omitted if there are none: a template may test whether they are defined.
        known = self._variables if tools is None else {**self._variables, "tools": tools}
        return self._template.render(messages=messages, add_generation_prompt=answer, **known)

    @cached_property
    def _template(self) -> Template:
        return compile_template(self._source)

    @cached_property
    def takes_system_message(self) -> bool:
        """Whether the template renders system messages: Gemma's rejects them, others drop them."""
        return PROBE in self._try([{"role": "system", "content": PROBE}, ASKED], None)

    @cached_property
    def takes_parts_alone(self) -> bool:
        """Whether the template only supports contents as lists of parts."""
        parts = [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
        return PROBE not in self._try([{"role": "user", "content": PROBE}], None) and PROBE in self._try(parts, None)

    @cached_property
    def takes_objects(self) -> bool:
        """Whether the template supports a call's arguments as an object; otherwise they are JSON text."""
        messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}]
        text = self._try(messages, [KNOWN_TOOL])
        return PROBE in text and str(CALLED["function"]["arguments"]) not in text  # type: ignore[index]  # it is a dict

    def _try(self, messages: Sequence[Message], tools: Tools | None) -> str:
        try:
            return self._render(messages, tools, True)
        except Exception:  # any error of the template means that it is unsupported
            return ""

    def _adapt_message(self, message: Message) -> Message:
        if message["role"] == "developer" and KNOWS_DEVELOPER not in self._source:
            message = {**message, "role": "system"}
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [self._adapt_call(call) for call in calls]}
        return message

    def _adapt_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if self.takes_objects:
            arguments = to_engine_values(parse_arguments(arguments))
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        return {**call, "function": {**function, "arguments": arguments}}


def merge_system_message(messages: Sequence[Message]) -> list[Message]:
    """Merge the system message into the beginning of the next one."""
    first, *others = messages
    if not others:
        return []
    return [{**others[0], "content": f"{first['content']}\n{others[0]['content']}"}, *others[1:]]
