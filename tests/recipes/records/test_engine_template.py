"""Chat templates rendered as the serving engine does, which produced these expectations (`test_engine_rendering`)."""

from typing import Any

import pytest

from recipes.records.engine_template import EngineTemplate

USER = {"role": "user", "content": "Who?"}
TURNS = "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}"
CALLS = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    "%s{% endfor %};{% endfor %}"
)


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", [{"where": "Lund é", "day": None}, '{"where":  "Lund \\u00e9", "day": null}'])
def test_arguments_are_objects_for_a_template_using_tojson(arguments: Any) -> None:
    template = EngineTemplate(CALLS.replace("%s", "{{ call.function.arguments | tojson }}"), {})
    assert template.render(called(arguments)) == 'user: Who?;assistant: {"where": "Lund é", "day": null};'


def test_arguments_are_strings_for_a_template_concatenating_them() -> None:
    template = EngineTemplate(CALLS.replace("%s", "{{ '```' + call.function.arguments }}"), {})
    assert template.render(called({"where": "Lund é", "n": 1.0})) == 'user: Who?;assistant: ```{"where":"Lund é","n":1.0};'
    assert template.render(called('{"where":  1}')) == 'user: Who?;assistant: ```{"where":  1};'


@pytest.mark.parametrize(
    ("number", "in_json", "printed"),
    [
        (1.0, "1", "1.0"),
        (1.5, "1.5", "1.5"),
        (55.70466, "55.7047", "55.70466"),
        (3.14159265, "3.14159", "3.141593"),
        (1500000.5, "1.5e+06", "1500000.5"),
        (1e-7, "1e-07", "0.0"),
        (-0.0, "-0", "-0.0"),
        (2**63 - 1, "9223372036854775807", "9223372036854775807"),
        (2**63 + 1, "-9223372036854775807", "-9223372036854775807"),
        (10**23, "1e+23", "99999999999999991611392.0"),
        (True, "true", "True"),
        (None, "null", ""),
    ],
)
def test_numbers_are_rendered_like_the_engine(number: Any, in_json: str, printed: str) -> None:
    written = "{{ call.function.arguments | tojson }} {{ call.function.arguments.n }}"
    template = EngineTemplate(CALLS.replace("%s", written), {})
    assert template.render(called({"n": number})) == f'user: Who?;assistant: {{"n": {in_json}}} {printed};'


def test_tojson_keeps_its_form_around_numbers() -> None:
    template = EngineTemplate("{{ tools | tojson(indent=1) }}", {})
    tool = {"type": "function", "function": {"name": "f", "description": "1.0", "parameters": {"x": 1.0}}}
    assert template.render([USER], [tool]).endswith(
        '"description": "1.0",\n   "parameters": {\n    "x": 1\n   }\n  }\n }\n]'
    )


@pytest.mark.parametrize("refusal", ["{{ raise_exception('no system role') }}", ""])
def test_system_message_is_prepended_to_next_turn_when_template_rejects_it(refusal: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    source = "{% if messages[0].role == 'system' %}" + refusal + "{% set messages = messages[1:] %}{% endif %}" + TURNS
    assert EngineTemplate(source, {}).render([system, USER]) == "user: Be brief.\nWho?;"
    assert EngineTemplate(TURNS, {}).render([system, USER]) == "system: Be brief.;user: Who?;"


def test_developer_role_becomes_system_unless_template_supports_it() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert EngineTemplate(TURNS, {}).render([developer, USER]) == "system: Be brief.;user: Who?;"
    assert EngineTemplate(TURNS + "{# <|channel|> #}", {}).render([developer, USER]) == "developer: Be brief.;user: Who?;"


def test_tools_are_undefined_in_template_when_not_given() -> None:
    assert EngineTemplate("{{ tools is defined }}", {}).render([USER]) == "False"
