"""Tokenize records, and mark the tokens that the loss is computed on."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from recipes.contracts.parameters import TokenizeParameters
from recipes.contracts.rendering import Rendering
from recipes.preparation.tokenization.chat_template import ChatTemplate, make_chat_template, make_messages
from recipes.preparation.tokenization.frozen_tokenizer import TOKENIZER_FILE, read_frozen_tokenizer
from recipes.preparation.tokenization.piece_tokenizer import TOKEN_ID_BYTES, PieceTokenizer, pack_ids
from recipes.preparation.tokenization.rewritten_turns import Span
from recipes.records.conversation import UnfitRecord, normalize_conversation, parse_json, read_optional_text
from recipes.records.record_layouts import Layout, instruction_messages, read_instruction

TOKEN_FIELDS = (
    ("input_ids", pa.list_(pa.int32())),
    ("assistant_mask", pa.list_(pa.bool_())),
    ("length", pa.int32()),
)
"""Columns of a tokenized dataset: `assistant_mask` has the length of `input_ids` and is true for tokens that the loss is
computed on; `length` is the number of tokens without padding."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of a record.

    `runs` alternates between numbers of tokens that are only read and tokens that are learned. `packed` holds the ids as
    32-bit numbers, the format of the files: lists of Python integers took longer than encoding.
    """

    packed: bytes
    runs: list[int]

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_ID_BYTES

    @property
    def ids(self) -> list[int]:
        return list(memoryview(self.packed).cast("i"))

    def cut(self, length: int) -> "Tokens":
        """Return the first `length` tokens."""
        runs, left = [], length
        for run in self.runs:
            runs.append(min(run, left))
            left -= runs[-1]
        return Tokens(self.packed[: length * TOKEN_ID_BYTES], runs)

    @property
    def teaches(self) -> bool:
        """Whether a token is learned; the first cannot be, since no token precedes it."""
        return sum(self.runs[1::2]) > (1 if self.runs[0] == 0 and self.runs[1] else 0)


class RecordTokenizer:
    """Tokenizes batches of records."""

    def __init__(self, folder: Path, parameters: TokenizeParameters) -> None:
        frozen = read_frozen_tokenizer(folder)
        self.parameters = parameters
        self.eos, self.padding = frozen.eos, frozen.padding
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._frozen = frozen
        self._template: ChatTemplate | None = None
        self._piece_tokenizer = PieceTokenizer(self._tokenizer)
        around = self._tokenizer.encode("", add_special_tokens=True).ids
        self._start_tokens = pack_ids(around[:1] if around and around[0] != frozen.eos else [])
        # Tokenizers of Llama 2 and Mistral add a space before each text, so that a continuation would start with two.
        self._joins_cleanly = self._encode("\n") + self._encode("a") == self._encode("\na")
        self._encodes_parts = frozen.around is not None and self._joins_cleanly

    @property
    def template(self) -> ChatTemplate:
        """The template, loaded when a record first needs it.

        A tokenizer for plain texts may have none.
        """
        if self._template is None:
            self._template = make_chat_template(
                self._frozen.template, self._frozen.special, self.parameters, self._frozen.around, self._frozen.rendering
            )
            for constant in self._frozen.around or ():
                self._piece_tokenizer.add_constant(constant)
        return self._template

    @cached_property
    def tool_template(self) -> ChatTemplate:
        """The template for conversations with tools, which may be the same."""
        return make_chat_template(
            self._frozen.template, self._frozen.special, self.parameters, None, self._frozen.rendering, tools=True
        )

    def tokenize(self, rows: Sequence[Mapping[str, Any]], layouts: Sequence[Layout]) -> list[Tokens | UnfitRecord]:
        """Return each record's full tokens, or why it has none."""
        found: list[Tokens | UnfitRecord | None] = [None] * len(rows)
        texts: list[str] = []
        owners: list[tuple[int, bytes, int, bytes]] = []  # record, tokens before its texts, number of texts, tokens after
        end = pack_ids([self.eos])
        for number, (row, layout) in enumerate(zip(rows, layouts, strict=True)):
            try:
                if layout is Layout.INSTRUCTION and self._encodes_parts and not self._has_system_message(row):
                    texts += (self.template.question(self._read_question(row)), row["answer"])
                    owners.append((number, b"", 2, end))
                elif layout is Layout.COMPLETION and not self._joins_cleanly:
                    found[number] = self._tokenize_completion(row["prompt"], row["completion"])
                elif layout is Layout.COMPLETION:
                    texts += (row["prompt"], row["completion"])
                    owners.append((number, self._start_tokens, 2, end))
                elif layout is Layout.TEXT:
                    texts += ("", row["text"])
                    owners.append((number, self._start_tokens, 2, end))
                elif layout in (Layout.INSTRUCTION, Layout.MESSAGES):
                    whole, spans = self._render_conversation(row, layout)
                    if parts := self._split_at_spans(whole, spans):
                        texts += parts
                        owners.append((number, b"", len(parts), b""))
                    else:
                        found[number] = self._tokenize_text(whole, spans)
                else:
                    raise UnfitRecord(f"{layout} is for preference training, which takes its texts as they are")
            except UnfitRecord as problem:
                found[number] = problem
        encoded = iter(self._piece_tokenizer.encode(texts))
        for number, head, count, tail in owners:
            ids = list(islice(encoded, count))
            # Texts prepared elsewhere may contain both already.
            if not (ids[0] or ids[1]).startswith(head):
                ids[0] = head + ids[0]
            if not ids[-1].endswith(tail):
                ids[-1] += tail
            found[number] = Tokens(b"".join(ids), [len(part) // TOKEN_ID_BYTES for part in ids])
        return found  # type: ignore[return-value]  # every place was filled above

    def _render_conversation(self, row: Mapping[str, Any], layout: Layout) -> tuple[str, list[Span]]:
        """Render a record as a conversation.

        An instruction's answer always ends with the end token: if the template ends turns with another token, inference
        engines may only know the end token.
        """
        if layout is Layout.INSTRUCTION:
            messages = instruction_messages(row)
            if self._renders_as_stored:
                messages = make_messages(("user", "assistant"), (row["instruction"], row["answer"]))
            whole, (answer,) = self.template.conversation(messages)
            end = str(self._frozen.special["eos_token"])
            text = whole[: answer.end].removesuffix(end) + end
            return text, [Span(answer.start, len(text))]
        if self._renders_as_stored:
            tools = read_stored_tools(row)
            return (self.tool_template if tools else self.template).conversation(row["messages"], tools)
        found = normalize_conversation(row)
        template = self.tool_template if found.tools else self.template
        whole, spans = template.conversation(found.messages, found.tools)
        return whole, [span for span, is_learned in zip(spans, found.learned, strict=True) if is_learned]

    @property
    def _renders_as_stored(self) -> bool:
        return self._frozen.rendering is Rendering.AS_STORED

    def _has_system_message(self, row: Mapping[str, Any]) -> bool:
        return not self._renders_as_stored and read_optional_text(row, "system") is not None

    def _read_question(self, row: Mapping[str, Any]) -> str:
        return str(row["instruction"]) if self._renders_as_stored else read_instruction(row)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _tokenize_completion(self, prompt: str, completion: str) -> Tokens:
        """Tokenize prompt and completion as one text."""
        text = prompt + completion
        found = self._tokenize_text(text, [Span(len(prompt), len(text))])
        end = pack_ids([self.eos])
        head = b"" if found.packed.startswith(self._start_tokens) else self._start_tokens
        tail = b"" if found.packed.endswith(end) else end
        read, answer, *_ = found.runs
        return Tokens(head + found.packed + tail, [read + len(head) // TOKEN_ID_BYTES, answer + len(tail) // TOKEN_ID_BYTES])

    def _split_at_spans(self, text: str, spans: Sequence[Span]) -> list[str] | None:
        """Split a text into alternating read-only and learned parts.

        None if a token would cross a boundary.
        """
        edges = [edge for span in spans for edge in (span.start, span.end)]
        if all(self._piece_tokenizer.splits_cleanly_at(text, edge) for edge in edges):
            return [*(text[start:end] for start, end in pairwise([0, *edges, len(text)])), ""]
        return None

    def _tokenize_text(self, text: str, spans: Sequence[Span]) -> Tokens:
        """Tokenize a text as a whole.

        A token that is partly in a span is learned.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts, ends = [start for start, _ in encoding.offsets], [end for _, end in encoding.offsets]
        runs, done = [], 0
        for span in spans:
            first, last = bisect_right(ends, span.start), bisect_left(starts, span.end)
            if last > first:
                runs += [first - done, last - first]
                done = last
        return Tokens(pack_ids(encoding.ids), [*runs, len(encoding.ids) - done, 0])


def read_stored_tools(row: Mapping[str, Any]) -> Any:
    """Return a conversation's tools as stored, for runs that began before tools were normalized."""
    tools = row.get("tools")
    return (parse_json(tools or "null", "'tools'") if isinstance(tools, str) else tools) or None


def build_token_columns(records: Sequence[Tokens], pad_to: int | None, padding: int) -> list[pa.Array]:
    """Build the columns of `TOKEN_FIELDS`, padded to `pad_to` tokens if it is set."""
    lengths = np.array([len(record) for record in records], dtype=np.int32)
    if pad_to is not None:
        fill = pack_ids([padding])
        records = [
            Tokens(record.packed + fill * rest, [*record.runs, rest, 0])
            for record, rest in zip(records, (pad_to - lengths).tolist(), strict=True)
        ]
    ends = np.cumsum([0, *map(len, records)], dtype=np.int32)
    ids = np.frombuffer(b"".join(record.packed for record in records), np.int32)
    runs = np.fromiter(chain.from_iterable(record.runs for record in records), np.int64)
    mask = np.repeat(np.tile([False, True], len(runs) // 2), runs)
    offsets = pa.array(ends)
    return [
        pa.ListArray.from_arrays(offsets, pa.array(ids)),
        pa.ListArray.from_arrays(offsets, pa.array(mask)),
        pa.array(lengths),
    ]
