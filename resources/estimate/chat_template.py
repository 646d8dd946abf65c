"""A chat template as transformers compiles it: in the same sandbox, with what it adds to jinja's language."""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}` marks what is learned, and changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compiled(template: str) -> Template:
    """Raises TemplateError: it is none. A model's file is not to be trusted: what it computes is sandboxed."""
    language = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    language.filters["tojson"] = as_json  # jinja's own is for HTML: it escapes more, and sorts
    language.globals |= {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
    return language.from_string(template)


def as_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def refuse(why: str) -> NoReturn:
    raise TemplateError(why)
