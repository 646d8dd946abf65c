"""Verify an export by comparing the engine's tokens and prompts with those of training."""

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import TokenizeParameters
from recipes.contracts.rendering import Rendering
from recipes.export.chat_templates import SERVED_TEMPLATES, named_templates
from recipes.export.gguf import write_probe_gguf
from recipes.extras import SERVE, lacking
from recipes.preparation.tokenization.chat_template import (
    DEFAULT_TEMPLATE,
    TOOL_TEMPLATE,
    ChatTemplate,
    make_chat_template,
)
from recipes.records.conversation import UnfitRecord

TEXTS = (
    "The quick brown fox asks: what's the name of the place where 12345 ships lie at anchor?",
    "  two before, three   within, and a tab\tat the end \t",
    "\n\nlines\r\n\r\n  of  \n \n both kinds \r",
    " ",
    "I'm, you'LL, they'Re; don't, DON'T",
    "1234567890 3.14 1e-5 \u0661\u0662\u0663 \u00bd \u00b2",
    "na\u00efve nai\u0308ve \u00c5ngstr\u00f6m \u0130stanbul \u00df",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002 \ud55c\uad6d\uc5b4 "
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f469\u200d\U0001f680\U0001f1e9\U0001f1ea\u2764\ufe0f \u00a0\u2009\u200b\u3000\ufeff|",
    "def f(x):\n    return x**2  # <b>&amp;</b> {{ x }} {% y %} \\n",
    "https://example.org/?a=1&b=%20#c _under_score__ CamelCaseHTTPServer",
)
"""Plain text, unusual whitespace, contractions, numbers, scripts with and without spaces, emoji, and code."""
CONVERSATIONS: tuple[Sequence[Mapping[str, str]], ...] = (
    [{"role": "user", "content": TEXTS[0]}],
    *([{"role": "user", "content": text}] for text in (TEXTS[1], TEXTS[2], TEXTS[8], TEXTS[9])),
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "She."},
        {"role": "user", "content": " And \u00bb why\u00ab?\n"},
    ],
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather\'s <forecast> for "Lund" \u2744',
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string"}, "day": {"type": "integer", "enum": [1, 2]}},
                "required": ["where"],
            },
        },
    }
]
TOKENS_PER_TEXT = 64
START_SECONDS = 120
REQUEST_SECONDS = 60
SHOWN_CHARACTERS = 80


def check_engine(model_dir: Path, gguf: Path, parameters: TokenizeParameters, rendering: Rendering) -> list[str]:
    """Compare the engine with training.

    Args:
        model_dir: the exported folder, with the tokenizer of training.
        gguf: the exported file.
        parameters: training's settings of the chat template.
        rendering: how training rendered records.

    Returns:
        Differences for requests with tools, if it is unknown whether training had tools.

    Raises:
        BadConfiguration: the first text or conversation that differs.
    """
    if problem := lacking("an export, which is verified with the engine,", SERVE):
        raise BadConfiguration(problem)
    training = TrainingText(model_dir, parameters, rendering)
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch, "probe.gguf")
        write_probe_gguf(gguf, probe)
        with start_engine(probe) as engine:
            if difference := next(iterate_differences(training, engine), None):
                raise BadConfiguration(difference)
            templates = training.templates
            # Unknown: the single templates of most base models accept tools.
            is_open = TOOL_TEMPLATE not in templates and "tools" in templates.get(DEFAULT_TEMPLATE, "")
            tools = find_render_difference(training, engine, DEFAULT_TEMPLATE, CONVERSATIONS[0], TOOLS) if is_open else None
            return [tools] if tools else []


def iterate_differences(training: "TrainingText", engine: "Engine") -> Iterator[str]:
    """Yield descriptions of differences."""
    for text in TEXTS:
        if difference := find_token_difference(training, engine, text):
            yield difference
    for text in added_token_texts(training.added_tokens, TOKENS_PER_TEXT):
        if difference := find_token_difference(training, engine, text):
            single = added_token_texts([token for token in training.added_tokens if token in text], 1)
            yield next(filter(None, (find_token_difference(training, engine, each) for each in single)), difference)
    if difference := find_start_difference(training, engine):
        yield difference
    for name in (name for name in SERVED_TEMPLATES if name in training.templates):
        for messages in CONVERSATIONS:
            tools = TOOLS if name == TOOL_TEMPLATE else None
            if difference := find_render_difference(training, engine, name, messages, tools):
                yield difference


class TrainingText:
    """Tokens and prompts of training."""

    def __init__(self, model_dir: Path, parameters: TokenizeParameters, rendering: Rendering) -> None:
        loaded: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        self._tokenizer = loaded.backend_tokenizer
        self._chosen = loaded.chat_template
        self.templates = named_templates(loaded.chat_template)
        self._special = dict(loaded.special_tokens_map)
        self._parameters = parameters
        self._rendering = rendering
        self._eos = loaded.eos_token_id
        self.added_tokens = sorted(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def start_tokens(self) -> list[int]:
        """Return the tokens that training puts before a text without a template."""
        around = self._tokenizer.encode("", add_special_tokens=True).ids
        return list(around[:1]) if around and around[0] != self._eos else []

    def prompt(self, messages: Sequence[Mapping[str, str]], tools: Any) -> str | None:
        """Render a conversation up to the answer; None if training rejects it."""
        template: ChatTemplate = make_chat_template(
            self._chosen, self._special, self._parameters, rendering=self._rendering, tools=bool(tools)
        )
        try:
            return template.prompt(messages, tools)
        except UnfitRecord:
            return None


class Engine:
    """Client of a running llama.cpp server."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        return list(self._post("/tokenize", {"content": text, "add_special": add_special, "parse_special": True})["tokens"])

    def prompt(self, messages: Sequence[Mapping[str, str]], tools: Any) -> str:
        """Render a conversation.

        Raises ValueError with the engine's reason if it is rejected.
        """
        body = {"messages": list(messages), **({"tools": tools} if tools else {})}
        try:
            return str(self._post("/apply-template", body)["prompt"])
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode(errors="replace")[:200]) from None

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with self._opener.open(request, timeout=REQUEST_SECONDS) as response:
            return json.loads(response.read())


@contextmanager
def start_engine(gguf: Path) -> Iterator[Engine]:
    """Run the engine. Raises BadConfiguration if llama.cpp does not load the file."""
    command = [sys.executable, "-m", "recipes.export.probe_server", str(gguf)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            address = process.stdout.readline().strip()
            if not address:
                said = process.stderr.read().strip().splitlines()
                raise BadConfiguration(f"llama.cpp does not load the exported vocabulary: {said[-1] if said else ''}")
            yield Engine(address)
        finally:
            process.kill()


def added_token_texts(tokens: Sequence[str], count: int) -> list[str]:
    """Return texts with added tokens inside words, between spaces and adjacent to each other."""
    groups = [tokens[start : start + count] for start in range(0, len(tokens), count)]
    return ["".join(f"a{token}b {token} {token}{token}\n" for token in group) for group in groups]


def find_token_difference(training: TrainingText, engine: Engine, text: str) -> str | None:
    expected, found = training.encode(text), engine.tokenize(text)
    if expected == found:
        return None
    return f"the engine tokenizes {show(text)} differently from training: {describe_difference(expected, found)}"


def find_start_difference(training: TrainingText, engine: Engine) -> str | None:
    expected, found = [*training.start_tokens(), *training.encode("a")], engine.tokenize("a", add_special=True)
    if found == expected or found == [*expected, *found[len(expected) :]]:  # the end token belongs to complete texts
        return None
    return f"the engine starts a text differently from training: {describe_difference(expected, found)}"


def find_render_difference(
    training: TrainingText, engine: Engine, template: str, messages: Sequence[Mapping[str, str]], tools: Any
) -> str | None:
    """Describe how the engine renders a conversation differently from training, or return None."""
    expected = training.prompt(messages, tools)
    if expected is None:
        return None
    where = f"chat template '{template}', {show(messages[-1]['content'])}{' with a tool' if tools else ''}"
    try:
        found = engine.prompt(messages, tools)
    except ValueError as error:
        return f"{where}: the engine rejects what training renders: {error}"
    expected_ids, found_ids = training.encode(expected), engine.tokenize(found, add_special=True)
    if expected_ids == found_ids:
        return None
    place = next((n for n, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), None)
    if place is None and len(expected) == len(found):
        return f"{where}: the engine starts it differently from training: {describe_difference(expected_ids, found_ids)}"
    start = min(len(expected), len(found)) if place is None else place
    return (
        f"{where}: the engine renders it differently from training: "
        f"{show(found[max(0, start - 20) :])} instead of {show(expected[max(0, start - 20) :])}"
    )


def describe_difference(expected: Sequence[int], found: Sequence[int]) -> str:
    """Describe the first tokens that differ."""
    place = next((n for n, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), None)
    start = min(len(expected), len(found)) if place is None else place
    return f"token {start + 1} is {list(found[start : start + 3])} instead of {list(expected[start : start + 3])}"


def show(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")
