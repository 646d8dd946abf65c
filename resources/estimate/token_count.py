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

# Counts the tokens of a dataset version for a model, from a sample of its records and the base model's own tokenizer.
#
# The tokenizer and its chat template are read from the object store, where the first job that uses a base model stores them;
# until then four bytes count as a token. The result always says which of these was used.

SAMPLE_PLACES = 16
SAMPLE_PLACE_BYTES = 64 << 10
"""A sample is this many parts of a file, evenly spaced; a file that is not larger is counted completely."""
BYTES_PER_TOKEN = 4.0
"""For English text and a vocabulary of 50,000 or more, with JSON's keys and quotes."""

END_TOKENS = 1
"""The end token after the learned text. A chat template writes its own."""


class ChatTokenCounter:
    """Counts a record's tokens as training produces them.

    Chat template or start token, texts, end token.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, variables: dict[str, Any], system_prompt: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = EngineTemplate(template, variables)
        self._system_prompt = system_prompt
        self._head = min(1, len(tokenizer.encode("", add_special_tokens=True)))

    def count(self, record: dict[str, Any]) -> int:
        """Return the tokens of a record.

        For a pair, those of both answers, each with the prompt.

        Raises:
            ValueError: the record cannot be trained on.
            TemplateError: of the chat template.
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
    """Return the tokens of a version.

    If its records cannot be read as conversations, they are estimated from the bytes.
    """
    # Other files may contain the records' tokens, perhaps for another model.
    files = [file for file in store.manifest(version.artifact).files if file.path.endswith(".jsonl")]
    try:
        counter = load_token_counter(recipe, store)
        if counter is not None and files:
            return sample_tokens(version, files, counter, store)
    except (KeyError, TypeError, ValueError, TemplateError):  # records of another layout, or a template that needs more
        pass
    # Uploaded files may be compressed or columnar.
    size = sum(file.size for file in files) or version.size_bytes
    source = f"assumed: {BYTES_PER_TOKEN:.0f} bytes are a token"
    return DatasetTokens(int(size / BYTES_PER_TOKEN), version.num_records, source)


def load_token_counter(recipe: Recipe, store: Store) -> ChatTokenCounter | None:
    """Return the base model's tokenizer with its chat template.

    None if the store does not have both.
    """
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
    """Return the template used for questions, if there are several (`recipes.preparation.tokenization.chat_template`)."""
    if not isinstance(templates, list):
        return templates
    return next((each["template"] for each in templates if each["name"] == "default"), None)


def sample_tokens(
    version: DatasetVersion, files: Sequence[FileRecord], counter: ChatTokenCounter, store: Store
) -> DatasetTokens:
    """Return the tokens per byte of the sample times all bytes.

    Raises ValueError: a line is not a record.
    """
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
    """Yield complete lines of an artifact's file, with newlines, from evenly spaced parts."""
    if file.size <= SAMPLE_PLACES * SAMPLE_PLACE_BYTES:
        yield from (line for line in b"".join(store.pieces(uri, file)).splitlines(keepends=True) if line.strip())
        return
    for number, part in enumerate(sample_parts(store, uri, file)):
        lines = part.split(b"\n")
        # The first line begins before the part, unless it is the file's first, and the last line ends after it.
        yield from (line + b"\n" for line in lines[bool(number) : -1] if line.strip())


def sample_parts(store: Store, uri: str, file: FileRecord) -> Iterator[bytes]:
    """Yield evenly spaced parts of a file, the first from its beginning.

    If the file is stored in chunks, the parts are the beginnings of chunks.
    """
    if file.chunks:
        last = len(file.chunks) - 1
        for number in sorted({place * last // (SAMPLE_PLACES - 1) for place in range(SAMPLE_PLACES)}):
            yield store.get_bytes(chunk_uri(uri, file.chunks[number].sha256))[:SAMPLE_PLACE_BYTES]
        return
    stored = store.open(f"{uri}/{file.path}")
    for place in range(SAMPLE_PLACES):
        start = place * (file.size - SAMPLE_PLACE_BYTES) // (SAMPLE_PLACES - 1)
        yield b"".join(stored.chunks(start, start + SAMPLE_PLACE_BYTES))
