"""Training and the serving engine tokenize the same messages and tools to equal tokens."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from recipes.export.gguf import export_gguf
from recipes.preparation.tokenization.record_tokenizer import Tokens
from recipes.records.record_reader import parse_record
from recipes.training.data.examples import prompt_tokens, tokenize_records
from resources.ingest.columnar import read_parquet
from resources.ingest.problems import Problem
from tests.recipes.llama_cpp import LlamaCpp
from tests.recipes.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

START = "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
END = "<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
HERMES = (
    "{%- if tools %}<|im_start|>system\n{%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content }}{%- endif %}"
    "\n# Tools\n<tools>{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}\n</tools><|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{%- elif message.role == 'assistant' %}<|im_start|>assistant{%- if message.content %}\n{{ message.content }}"
    "{%- endif %}{%- for call in message.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{%- elif message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
TEXTS = (
    "{%- for tool in tools or [] %}{{ tool.function | tojson }}\n{%- endfor %}"
    + START
    + "{%- for call in message.tool_calls"
    " or [] %}<call>{{ call.function.name }}\n```json\n{{ call.function.arguments + '\n```</call>' }}{%- endfor %}" + END
)
XML = (
    "{%- if tools is defined %}Tools.\n{% endif %}"
    "{%- if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    + START
    + "{%- for call in message.tool_calls or [] %}<tool_call><function={{ call.function.name }}>"
    "{%- for key, value in call.function.arguments.items() %}<parameter={{ key }}>"
    "{{ value | tojson if value is mapping else value }}</parameter>{%- endfor %}</function></tool_call>{%- endfor %}" + END
)
PARTS = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- for part in message.content %}{{ '[' + part['text'] }}{%- endfor %}" + END
)
TEMPLATES = {"Hermes": HERMES, "JSON texts": TEXTS, "XML without a system role": XML, "parts": PARTS}

ASKED = {"role": "user", "content": "Who keeps the lamp?"}
ANSWERED = {"role": "assistant", "content": "The keeper."}
SCHEMA = {
    "type": "object",
    "properties": {"where": {"type": "string"}, "day": {"type": "number", "minimum": 1.0}},
    "required": ["where"],
}
TOOLS = [
    {"function": {"parameters": SCHEMA, "name": "weather", "strict": True}, "type": "function"},
    {
        "type": "function",
        "function": {"name": "left", "description": "<left> é", "parameters": {"b": {"x": 1}, "a": {"x": 2}}},
    },
]


def calling(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}, **more}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


TOOL_RESULT = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "weather"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": ([{"role": "system", "content": "Be brief."}, ASKED, ANSWERED, ASKED], None),
    "ordered": (
        [ASKED, calling("weather", {"where": "Lund", "at": None, "b": {"z": 1, "a": [2]}}, id="c1"), TOOL_RESULT],
        TOOLS,
    ),
    "texts": ([ASKED, calling("weather", '{"where":  "Lund \\u00e9", "day": 2.50}'), TOOL_RESULT, ANSWERED, ASKED], TOOLS),
    "numbers": (
        [ASKED, calling("weather", {"day": 1.0, "n": -0.0, "where": 55.70466, "big": 2**63, "x": 1500000.5})],
        TOOLS,
    ),
    "more keys": (
        [{**ASKED, "name": "Ann"}, {**ANSWERED, "reasoning_content": "Hm.", "refusal": None, "weight": 0}, ASKED],
        None,
    ),
    "developer": ([{"role": "developer", "content": "Be brief."}, ASKED], None),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaCpp, Any]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATES[request.param]
    tokenizer.save_pretrained(folder)
    export_gguf(folder, folder / "model.gguf", "F16")
    return LlamaCpp(folder / "model.gguf"), tokenizer


def learned_prompt(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    """Return the tokens that precede the answer in training."""
    (found,) = tokenize_records(tokenizer, [parse_record({"messages": [*messages, ANSWERED], "tools": tools})], None)
    assert isinstance(found, Tokens), found
    return prompt_tokens(found)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_training_prompt_equals_engine_prompt(engine: tuple[LlamaCpp, Any], name: str) -> None:
    server, tokenizer = engine
    messages, tools = CONVERSATIONS[name]
    if messages[-1]["role"] == "assistant":
        messages = [*messages, TOOL_RESULT]
    sent = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    asked = server.render(sent, tools)
    assert tokenizer.decode(learned_prompt(tokenizer, messages, tools)) == asked
    assert learned_prompt(tokenizer, messages, tools) == server.tokenize(asked)


def test_null_arguments_added_by_parquet_are_not_learned(engine: tuple[LlamaCpp, Any], tmp_path: Path) -> None:
    server, tokenizer = engine
    calls = [calling("weather", {"city": "Lund"}), calling("left", {"left": 1, "right": 2})]
    rows = [{"messages": [ASKED, call, TOOL_RESULT, ANSWERED], "tools": TOOLS} for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with (tmp_path / "rows.parquet").open("rb") as file:
        read = [row for row in read_parquet(file) if not isinstance(row, Problem)]
    for row, call in zip(read, calls, strict=True):
        asked = server.render([ASKED, call, TOOL_RESULT], TOOLS)
        assert learned_prompt(tokenizer, row["messages"][:-1], row["tools"]) == server.tokenize(asked), json.dumps(row)
