"""Named chat templates in a GGUF file: complete, ordered, as set in training."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter
from jinja2.sandbox import ImmutableSandboxedEnvironment

from recipes.contracts.job import BadConfiguration
from recipes.export.chat_templates import (
    add_training_values,
    check_served,
    read_chat_templates,
    to_jinja,
    write_chat_templates,
)

NAMES = ("default", "tool_use", "rag", "a", "b", "c", "d", "e")


def write(folder: Path, config: object = None, **files: str) -> Path:
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
    for name, text in files.items():
        path = f"additional_chat_templates/{name}.jinja" if name != "default" else "chat_template.jinja"
        (folder / path).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("config", "files", "found"),
    [
        (None, {}, {}),
        ("x", {}, {"default": "x"}),
        (
            [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "x"}],
            {},
            {"default": "x", "tool_use": "t"},
        ),
        ("old", {"default": "x", "rag": "r"}, {"default": "x", "rag": "r"}),
        ("old", {"rag": "r"}, {"rag": "r"}),
    ],
)
def test_chat_templates_are_read_like_transformers(
    tmp_path: Path, config: object, files: dict[str, str], found: dict[str, str]
) -> None:
    assert read_chat_templates(write(tmp_path, config, **files)) == found


def write_gguf(path: Path) -> str:
    writer = GGUFWriter(path, "llama")
    write_chat_templates(writer, dict.fromkeys(NAMES, "text"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_gguf_file_is_independent_of_the_hash_seed(tmp_path: Path) -> None:
    program = (
        f"from pathlib import Path; from {__name__} import write_gguf; print(write_gguf(Path({str(tmp_path / 'x')!r})))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    fields = GGUFReader(tmp_path / "x").fields
    assert fields["tokenizer.chat_templates"].contents() == sorted(set(NAMES) - {"default"})
    assert fields["tokenizer.chat_template"].contents() == fields["tokenizer.chat_template.rag"].contents() == "text"


def test_template_names_colliding_in_gguf_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="not distinct"):
        write_chat_templates(GGUFWriter(tmp_path / "x", "llama"), {"tool-use": "a", "tool_use": "b"})


def test_templates_without_a_served_one_are_refused(tmp_path: Path) -> None:
    check_served({}, tmp_path)
    check_served({"tool_use": "x"}, tmp_path)
    with pytest.raises(BadConfiguration, match="the engine renders none of the chat templates a, rag"):
        check_served({"a": "x", "rag": "x"}, tmp_path)


def render(template: str, **variables: object) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(**variables)


@pytest.mark.parametrize(
    "start", ["", "\n", "\n  ", "  {% if true %}x{% endif %}", "{{- 'x' }}", "{%- if true %}\nx{% endif %}"]
)
def test_template_prefix_does_not_change_its_rendering(start: str) -> None:
    text = start + "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{{ a }}"
    served = add_training_values({"default": text, "rag": text}, "be kind", {"a": "A"})
    assert served["rag"] == text, "the engine does not render it"
    for messages in ([{"role": "system", "content": "own"}, {"role": "user", "content": "q"}],):
        assert render(served["default"], messages=messages) == render(text, messages=messages, a="A")
    asked = [{"role": "user", "content": "q"}]
    with_prompt = [{"role": "system", "content": "be kind"}, *asked]
    assert render(served["default"], messages=asked) == render(text, messages=with_prompt, a="A")
    assert add_training_values({"default": text}, None, {}) == {"default": text}, "files that were exported before stay"


@pytest.mark.parametrize(
    "value", ["a\"b'c\\d\n\t{{ x }} %} \u00e4\U0001f389", 3, 1.5, True, None, [1, [None]], {"k": {"l": "m"}}, "", -2]
)
def test_json_value_round_trips_through_a_template(value: object) -> None:
    assert render(f"{{{{ {to_jinja(value)} == given }}}}", given=value) == "True"


def test_invalid_template_variable_name_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="'a-b' is not a variable name"):
        add_training_values({"default": "x"}, None, {"a-b": 1})
