"""Pairs of a chosen and a rejected answer to a prompt, and their log-probabilities.

Texts are used as they are: no chat template is applied to a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from recipes.contracts.job import BadConfiguration
from recipes.contracts.quantities import pluralize
from recipes.contracts.recipe import Recipe
from recipes.records.conversation import UnfitRecord
from recipes.records.record_layouts import Layout
from recipes.records.record_reader import Record, read_records
from recipes.runner import log_line
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.data.examples import IGNORED_LABEL, Example, build_example, tokenize_records
from recipes.training.data.packing import find_learned_positions
from recipes.training.token_loss import compute_token_losses

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PreferencePair:
    """Two answers, each with their prompt."""

    chosen: Example
    rejected: Example


def split_pair(record: Record) -> tuple[Record, Record]:
    """Split a pair into two records of one answer each, the chosen one first."""
    prompt = record.row["prompt"]
    chosen, rejected = (
        Record({"prompt": prompt, "completion": record.row[name]}, Layout.COMPLETION) for name in ("chosen", "rejected")
    )
    return chosen, rejected


def encode_pairs(tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], recipe: Recipe) -> list[PreferencePair]:
    """Tokenize both answers of each record, truncated to sequence_length.

    A pair is left out if one of its answers is truncated entirely.

    Raises:
        BadConfiguration: a record is no pair, or no pair is left.
    """
    if not records:
        raise BadConfiguration("it has no records: give the dataset more of them, or this split a larger share")
    for number, record in enumerate(records, start=1):
        if record.layout is not Layout.PREFERENCE:
            raise BadConfiguration(
                f"record {number} is {record.layout}: objective {recipe.objective} needs {Layout.PREFERENCE}"
            )
    halves = [half for record in records for half in split_pair(record)]
    encoded = [
        found for found in tokenize_records(tokenizer, halves, recipe.system_prompt) if not isinstance(found, UnfitRecord)
    ]
    cut = [tokens.cut(recipe.sequence_length) for tokens in encoded]
    pairs = [
        PreferencePair(build_example(chosen), build_example(rejected))
        for chosen, rejected in zip(cut[::2], cut[1::2], strict=True)
        if chosen.teaches and rejected.teaches
    ]
    if not pairs:
        raise BadConfiguration(f"no answer fits into sequence_length {recipe.sequence_length}: raise it in the recipe")
    if left_out := len(records) - len(pairs):
        log_line(f"{left_out} of {pluralize(len(records), 'pair')} left out: an answer is past sequence_length")
    return pairs


def read_pairs(
    split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> list[PreferencePair]:
    """Read all pairs of a split, in its order."""
    pairs = encode_pairs(tokenizer, read_records(store.fetch(split, cache)), recipe)
    log_line(pluralize(len(pairs), "pair"))
    return pairs


def collate_pairs(pairs: Sequence[PreferencePair]) -> Batch:
    """Build `input_ids` and `labels` [2 * pairs, longest]: the chosen answers, then the rejected ones.

    Rows are padded on the right, where causal attention ignores padding, so there is no mask. Positions that are prompt in
    all rows get no logits (`recipes.training.data.packing`).
    """
    examples = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    longest = max(len(example.tokens) for example in examples)
    rest = [longest - len(example.tokens) for example in examples]
    labels = torch.tensor([[*e.labels, *[IGNORED_LABEL] * missing] for e, missing in zip(examples, rest, strict=True)])
    places, following = find_learned_positions(labels)
    return {
        "input_ids": torch.tensor([[*e.tokens, *[0] * missing] for e, missing in zip(examples, rest, strict=True)]),
        "labels": labels,
        "logits_to_keep": places,
        "shift_labels": following,
    }


def token_log_probabilities(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p of each answer token, 0 elsewhere, and the mask of answer tokens.

    Both [rows, places].
    """
    logits = model(input_ids=batch["input_ids"], logits_to_keep=batch["logits_to_keep"], use_cache=False).logits
    targets = batch["shift_labels"]
    return -compute_token_losses(logits.flatten(0, 1), targets.flatten()).view_as(targets), targets != IGNORED_LABEL


def log_probabilities(model: Any, batch: Batch) -> torch.Tensor:
    """Return log p of each answer, the sum over its tokens: [2, pairs]."""
    return token_log_probabilities(model, batch)[0].sum(-1).view(2, -1)


def mean_log_probabilities(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean log p over the tokens of each answer: [2, pairs]."""
    found, inside = token_log_probabilities(model, batch)
    return (found.sum(-1) / inside.sum(-1)).view(2, -1)


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return mean rewards, their margin, and how often the chosen answer's is higher.

    Means are included because a margin also grows when both answers become less likely. Values stay on the device.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "reward_chosen": chosen.mean(),
        "reward_rejected": rejected.mean(),
        "reward_accuracy": (chosen > rejected).float().mean(),
        "reward_margin": (chosen - rejected).mean(),
    }
