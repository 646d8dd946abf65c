"""Score a model on held-out records: loss of the answers, and accuracy.

Accuracy depends on the layout (`recipes.records.record_layouts`). For questions, the model's greedy answer must contain the
record's key. For pairs, the chosen answer must be more likely than the rejected one, by the mean over tokens. For plain
texts, it is the share of tokens that the model would have generated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import EvaluateParameters
from recipes.contracts.recipe import Recipe
from recipes.contracts.rendering import CURRENT_RENDERING, Rendering
from recipes.preparation.tokenization.record_tokenizer import Tokens
from recipes.records.conversation import UnfitRecord
from recipes.records.record_layouts import Layout
from recipes.records.record_reader import Record, normalize_text
from recipes.runner import log_line
from recipes.training.data.examples import encode_examples, prompt_tokens, tokenize_records
from recipes.training.data.packing import collate, pack_examples
from recipes.training.data.preference_pairs import (
    Batch,
    PreferencePair,
    collate_pairs,
    encode_pairs,
    mean_log_probabilities,
    split_pair,
)
from recipes.training.token_loss import compute_token_losses

GENERATION_BATCH = 16


@dataclass(frozen=True)
class Scores:
    """Scores of a model: mean loss per answer token in nats, perplexity, and accuracy."""

    loss: float
    perplexity: float
    accuracy: float
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Likelihood:
    """Mean negative log-likelihood of answer tokens in nats, and next-token accuracy."""

    loss: float
    next_token_accuracy: float


@torch.inference_mode()
def measure_likelihood(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    recipe: Recipe,
    rendering: Rendering = CURRENT_RENDERING,
) -> Likelihood:
    """Measure the likelihood of answers; for pairs, of the chosen ones.

    Raises:
        BadConfiguration: no record has an answer that fits into the recipe's sequence_length.
    """
    chosen = [split_pair(record)[0] if record.layout is Layout.PREFERENCE else record for record in records]
    total, right, count = 0.0, 0, 0
    for row in pack_examples(
        encode_examples(tokenizer, chosen, recipe.system_prompt, recipe.sequence_length, rendering),
        recipe.sequence_length,
        tokenizer.eos_token_id,
    ):
        batch = move_to_device(collate([vars(row)]), model)
        del batch["labels"]
        targets = batch.pop("shift_labels")
        # With a cache, the mask between packed examples is disabled (transformers 5.23).
        logits = model(**batch, use_cache=False).logits
        total += float(compute_token_losses(logits.flatten(0, 1), targets.flatten()).sum())
        right += int((logits.argmax(-1) == targets).sum())
        count += int((targets >= 0).sum())
    return Likelihood(total / count, right / count)


@torch.inference_mode()
def measure_preference_accuracy(model: PreTrainedModel, pairs: Sequence[PreferencePair]) -> float:
    """Return the share of pairs whose chosen answer the model finds more likely."""
    right = 0
    for pair in pairs:
        chosen, rejected = mean_log_probabilities(model, move_to_device(collate_pairs([pair]), model)).tolist()
        right += chosen > rejected
    return right / len(pairs)


@torch.inference_mode()
def generate_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[str]:
    """Generate greedy answers in batches, padded on the left.

    Generation stops at the tokenizer's end token or those of the model's configuration: Gemma and Llama 3 end turns with
    another one.
    """
    stated = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])} - {None}
    answers: list[str] = []
    for start in range(0, len(prompts), GENERATION_BATCH):
        batch = prompts[start : start + GENERATION_BATCH]
        longest = max(map(len, batch))
        tokens = torch.tensor([[tokenizer.eos_token_id] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        out = model.generate(
            **move_to_device({"input_ids": tokens, "attention_mask": mask}, model),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=sorted(ends),
        )
        answers += [text.strip() for text in tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)]
    return answers


def move_to_device(batch: Batch, model: PreTrainedModel) -> Batch:
    """Move a batch to the model's device."""
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


def tokenize_questions(
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    system_prompt: str | None,
    rendering: Rendering = CURRENT_RENDERING,
) -> list[Tokens | UnfitRecord]:
    """Tokenize questions with expected answers; UnfitRecord if the chat template rejects one."""
    asked = [split_pair(record)[0] if record.layout is Layout.PREFERENCE else record for record in records]
    return tokenize_records(tokenizer, asked, system_prompt, rendering)


def select_answerable(
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    system_prompt: str | None,
    rendering: Rendering = CURRENT_RENDERING,
) -> tuple[list[Record], list[UnfitRecord]]:
    """Return the records that the chat template accepts, and the reasons for rejecting others."""
    found = tokenize_questions(tokenizer, records, system_prompt, rendering)
    fit = [record for record, tokens in zip(records, found, strict=True) if not isinstance(tokens, UnfitRecord)]
    return fit, [tokens for tokens in found if isinstance(tokens, UnfitRecord)]


def build_prompts(
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    system_prompt: str | None,
    rendering: Rendering = CURRENT_RENDERING,
) -> list[list[int]]:
    """Tokenize questions up to the answer. Raises BadConfiguration if the chat template rejects one."""
    prompts = []
    for tokens in tokenize_questions(tokenizer, records, system_prompt, rendering):
        if isinstance(tokens, UnfitRecord):
            raise BadConfiguration(f"a question {tokens}")
        prompts.append(prompt_tokens(tokens) or [tokenizer.eos_token_id])  # a plain text is generated from nothing
    return prompts


def score_model(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    parameters: EvaluateParameters,
    rendering: Rendering = CURRENT_RENDERING,
) -> Scores:
    """Score a model on `select_answerable` records of one layout.

    Answers are generated for the first `samples` records and for the questions.

    Raises:
        BadConfiguration: no record fits into the recipe's sequence_length, or the chat template rejects a question.
    """
    recipe, layout = parameters.recipe, records[0].layout
    found = measure_likelihood(model, tokenizer, records, recipe, rendering)
    asked = records[: parameters.samples]
    # The answer is not used; some templates reject an empty one.
    questions = [Record({"instruction": text, "answer": "A"}, Layout.INSTRUCTION) for text in parameters.questions]
    prompts = build_prompts(tokenizer, [*asked, *questions], recipe.system_prompt, rendering)
    answers = generate_answers(model, tokenizer, prompts, parameters.max_new_tokens)
    if layout is Layout.PREFERENCE:
        accuracy = measure_preference_accuracy(model, encode_pairs(tokenizer, records, recipe))
    elif layout is Layout.TEXT:
        accuracy = found.next_token_accuracy
    else:
        right = sum(is_correct(record, answer) for record, answer in zip(asked, answers, strict=False))
        accuracy = right / len(asked)
    perplexity = math.exp(min(found.loss, 700.0)) if math.isfinite(found.loss) else math.inf
    log_line(f"{name}: loss {found.loss:.4f}, perplexity {perplexity:.3f}, accuracy {accuracy:.3f}")
    return Scores(loss=found.loss, perplexity=perplexity, accuracy=accuracy, answers=tuple(answers))


def is_correct(record: Record, answer: str) -> bool:
    """Return whether an answer contains the record's key as whole words."""
    return f" {normalize_text(record.key)} " in f" {normalize_text(answer)} "
