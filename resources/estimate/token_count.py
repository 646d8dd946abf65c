"""Count a dataset version's tokens by sampling, with the base model's tokenizer."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from recipes.contracts.recipe import Recipe
from recipes.records.conversation import SYSTEM_ROLES, Message, normalize_conversation
from recipes.records.engine_template import EngineTemplate, Tools
from recipes.records.record_layouts import LAYOUT_KEYS, Layout, detect_layout, instruction_messages
from recipes.storage.artifact_store import Store
from recipes.storage.locations import chunk_uri
from recipes.storage.manifest import FileRecord
from resources.estimate.job_estimate import DatasetTokens
from resources.metadata.datasets import DatasetVersion

# How many tokens a dataset version has for a model, from a sample of its records and the base model's own tokenizer.
#
# The tokenizer and its chat template are read from the object store, where the first job that uses a base model puts
# them; until then four bytes count as a token. The answer always says which of these it is.

SAMPLE_PLACES = 16
SAMPLE_PLACE_BYTES = 64 << 10
"""A sample is that many places of a file, evenly spread; a file that is no larger is counted whole."""
BYTES_PER_TOKEN = 4.0
"""Of English text with a vocabulary of 50,000 and more; JSON's keys and quotes included."""

END_TOKENS = 1
"""The token behind what is learned. A chat template writes its own."""


class ChatTokenCounter:
    """Counts a record's tokens as the program train makes them: chat template or beginning, texts, end token."""

    def __init__(self, tokenizer: Tokenizer, template: str, variables: dict[str, Any], system_prompt: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = EngineTemplate(template, variables)
        self._system_prompt = system_prompt
        self._head = min(1, len(tokenizer.encode("", add_special_tokens=True)))

    def count(self, record: dict[str, Any]) -> int:
        """Tokens of one record, of a pair those of both answers with their prompt: each is read.

        Raises ValueError where it is nothing to train on, TemplateError of the template.
        """
        match detect_layout(record):
            case Layout.INSTRUCTION:
                question = self._rendered(instruction_messages(record)[:-1], add_prompt=True)
                return self._encoded(question, record["answer"]) + END_TOKENS
            case Layout.MESSAGES:
                conversation = normalize_conversation(record)
                return self._encoded(self._rendered(conversation.messages, conversation.tools))
            case Layout.PREFERENCE:
                answers = (self._encoded(record["prompt"], record[name]) for name in ("chosen", "rejected"))
                return sum(answers) + 2 * (self._head + END_TOKENS)
            case layout:
                return self._head + self._encoded(*(record[key] for key in LAYOUT_KEYS[layout])) + END_TOKENS

    def _encoded(self, *texts: str) -> int:
        return sum(len(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    def _rendered(self, messages: list[Message], tools: Tools | None = None, *, add_prompt: bool = False) -> str:
        if self._system_prompt is not None and messages[0]["role"] not in SYSTEM_ROLES:
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        return self._template.render(messages, tools, answer=add_prompt)


def count_dataset_tokens(version: DatasetVersion, recipe: Recipe, store: Store) -> DatasetTokens:
    """Tokens of a whole version. What cannot be read as a conversation is estimated by its bytes."""
    # Beside the records may lie their tokens, for another model perhaps.
    files = [file for file in store.manifest(version.artifact).files if file.path.endswith(".jsonl")]
    try:
        counter = load_token_counter(recipe, store)
        if counter is not None and files:
            return sample_tokens(version, files, counter, store)
    except (KeyError, TypeError, ValueError, TemplateError):  # records of another form, or a template that needs more
        pass
    # What was uploaded may be compressed, or of columns.
    size = sum(file.size for file in files) or version.size_bytes
    source = f"assumed: {BYTES_PER_TOKEN:.0f} bytes are a token"
    return DatasetTokens(int(size / BYTES_PER_TOKEN), version.num_records, source)


def load_token_counter(recipe: Recipe, store: Store) -> ChatTokenCounter | None:
    """The base model's tokenizer with its chat template; none where the store does not have both."""
    uri = recipe.base_model.artifact_uri
    if uri is None:
        return None
    try:
        tokenizer = Tokenizer.from_buffer(store.get_bytes(f"{uri}/tokenizer.json"))
        config = json.loads(store.get_bytes(f"{uri}/tokenizer_config.json"))
        template = default_template(config.get("chat_template")) or store.get_bytes(f"{uri}/chat_template.jinja").decode()
    except FileNotFoundError:
        return None
    special = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    return ChatTokenCounter(tokenizer, template, special, recipe.system_prompt)


def default_template(templates: str | list[dict[str, str]] | None) -> str | None:
    """Of several templates by name the one that questions take (`recipes.preparation.tokenization.chat_template`)."""
    if not isinstance(templates, list):
        return templates
    return next((each["template"] for each in templates if each["name"] == "default"), None)


def sample_tokens(
    version: DatasetVersion, files: Sequence[FileRecord], counter: ChatTokenCounter, store: Store
) -> DatasetTokens:
    """Tokens for each byte of the sample, times all bytes. Raises ValueError on what is no record."""
    read = tokens = records = 0
    for file in files:
        for line in sample_lines(store, version.artifact.uri, file):
            read += len(line)
            records += 1
            tokens += counter.count(json.loads(line))
    if not read:
        raise ValueError("no record is short enough to be sampled")
    whole = records >= version.num_records
    count = tokens if whole else round(tokens / read * sum(file.size for file in files))
    source = "counted" if whole else f"sampled: {records} of {version.num_records} records"
    return DatasetTokens(count, version.num_records, f"{source}, with the base model's tokenizer")


def sample_lines(store: Store, uri: str, file: FileRecord) -> Iterator[bytes]:
    """Whole lines of an artifact's file with their newlines, from places evenly spread over it."""
    if file.size <= SAMPLE_PLACES * SAMPLE_PLACE_BYTES:
        yield from (line for line in b"".join(store.pieces(uri, file)).splitlines(keepends=True) if line.strip())
        return
    for number, part in enumerate(sample_parts(store, uri, file)):
        lines = part.split(b"\n")
        # The first line began before the part, where that is not the file's first, and the last one ends behind it.
        yield from (line + b"\n" for line in lines[bool(number) : -1] if line.strip())


def sample_parts(store: Store, uri: str, file: FileRecord) -> Iterator[bytes]:
    """The beginnings of chunks, where the file lies in chunks; the first is the file's own."""
    if file.chunks:
        last = len(file.chunks) - 1
        for number in sorted({place * last // (SAMPLE_PLACES - 1) for place in range(SAMPLE_PLACES)}):
            yield store.get_bytes(chunk_uri(uri, file.chunks[number].sha256))[:SAMPLE_PLACE_BYTES]
        return
    stored = store.open(f"{uri}/{file.path}")
    for place in range(SAMPLE_PLACES):
        start = place * (file.size - SAMPLE_PLACE_BYTES) // (SAMPLE_PLACES - 1)
        yield b"".join(stored.chunks(start, start + SAMPLE_PLACE_BYTES))
