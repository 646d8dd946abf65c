"""Tokenize records for training, and mark the tokens that the loss is computed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import TokenizeParameters
from recipes.contracts.quantities import pluralize
from recipes.contracts.rendering import CURRENT_RENDERING, Rendering
from recipes.preparation.tokenization.frozen_tokenizer import write_tokenizer_files
from recipes.preparation.tokenization.record_tokenizer import RecordTokenizer, Tokens
from recipes.records.conversation import UnfitRecord, describe_unread
from recipes.records.record_layouts import find_unread
from recipes.records.record_reader import Record
from recipes.runner import log_line

if TYPE_CHECKING:  # importing transformers takes a second
    from transformers import PreTrainedTokenizerBase

IGNORED_LABEL = -100
"""Label that the loss ignores (torch.nn.CrossEntropyLoss)."""


@dataclass(frozen=True)
class Example:
    """A tokenized record.

    `labels` equals `tokens` where the loss is computed, else `IGNORED_LABEL`; both have the same length.
    """

    tokens: tuple[int, ...]
    labels: tuple[int, ...]


def make_record_tokenizer(
    tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, rendering: Rendering = CURRENT_RENDERING
) -> RecordTokenizer:
    """Return a tokenizer for records that gives the same tokens as preparation."""
    with TemporaryDirectory() as folder:
        parameters = TokenizeParameters(tokenizer=tokenizer.name_or_path, system_prompt=system_prompt)
        write_tokenizer_files(tokenizer, Path(folder), parameters, rendering)
        return RecordTokenizer(Path(folder), parameters)


def tokenize_records(
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    system_prompt: str | None,
    rendering: Rendering = CURRENT_RENDERING,
) -> list[Tokens | UnfitRecord]:
    """Tokenize records in full length, as preparation does; UnfitRecord holds the reason for a failure."""
    encoder = make_record_tokenizer(tokenizer, system_prompt, rendering)
    return encoder.tokenize([record.row for record in records], [record.layout for record in records])


def build_example(tokens: Tokens) -> Example:
    mask = [number % 2 == 1 for number, run in enumerate(tokens.runs) for _ in range(run)]
    labels = (token if taught else IGNORED_LABEL for token, taught in zip(tokens.ids, mask, strict=True))
    return Example(tuple(tokens.ids), tuple(labels))


def encode_examples(
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    system_prompt: str | None,
    max_length: int,
    rendering: Rendering = CURRENT_RENDERING,
) -> list[Example]:
    """Tokenize records for training; only assistant turns with their end tokens are learned.

    Records longer than `max_length` tokens are truncated. Records without any remaining answer token are left out, because
    their loss is NaN, and so are those that the chat template rejects.

    Raises:
        BadConfiguration: no record is left.
    """
    tally = ExampleTally(max_length)
    examples = [
        build_example(tokens)
        for tokens in tally.select_records(tokenize_records(tokenizer, records, system_prompt, rendering) if records else ())
    ]
    tally.report_losses()
    return examples


@dataclass
class ExampleTally:
    """Truncates records to `max_length` tokens and counts the outcomes."""

    max_length: int
    records: int = 0
    num_kept: int = 0
    cut: int = 0
    refused: int = 0
    first_refused: UnfitRecord | None = None
    unread: Counter[str] = field(default_factory=Counter)

    def count_unread(self, records: Iterable[Record]) -> None:
        """Count message fields that the chat template does not render."""
        for record in records:
            self.unread.update(find_unread(record.row, record.layout))

    def select_records(self, found: Iterable[Tokens | UnfitRecord]) -> Iterator[Tokens]:
        """Yield truncated records that have a token to learn."""
        for each in found:
            self.records += 1
            if isinstance(each, UnfitRecord):
                self.refused += 1
                self.first_refused = self.first_refused or each
            elif (tokens := each.cut(self.max_length)).teaches:
                self.num_kept += 1
                self.cut += len(tokens) < len(each)
                yield tokens

    def report_losses(self) -> None:
        """Log what was left out and truncated.

        Raises:
            BadConfiguration: nothing is left.
        """
        if not self.records:
            raise BadConfiguration("it has no records: give the dataset more of them, or this split a larger share")
        if self.refused:
            log_line(f"{self.refused} of {pluralize(self.records, 'record')} left out: the first {self.first_refused}")
        if self.unread:
            log_line(f"not rendered, as the serving engine drops it: {describe_unread(self.unread)}")
        if not self.num_kept and self.refused:
            raise BadConfiguration(f"no record can be trained on: the first {self.first_refused}")
        if not self.num_kept:
            raise BadConfiguration(f"no answer fits into sequence_length {self.max_length}: raise it in the recipe")
        if left_out := self.records - self.num_kept - self.refused:
            log_line(f"{left_out} of {pluralize(self.records, 'record')} {describe_prompt_overflow(self.max_length)}")
        if self.cut:
            log_line(f"{self.cut} of {pluralize(self.records, 'record')} {describe_truncation(self.max_length)}")


def describe_truncation(length: int) -> str:
    return f"cut at sequence_length {length}: what is said behind it is not learned"


def describe_prompt_overflow(length: int) -> str:
    return f"left out: a prompt alone fills sequence_length {length}"


def prompt_tokens(tokens: Tokens) -> list[int]:
    """Return the tokens before the last assistant turn."""
    runs = tokens.runs if tokens.runs[-1] else tokens.runs[:-2]  # a conversation may end with tokens that are not learned
    return tokens.ids[: sum(runs[:-1])]
