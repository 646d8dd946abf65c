"""What a model gets on held-out records: the loss of their answers, and how many it gets right.

What "right" means depends on the layout (`recipes.records.record_layouts`). Where something is asked, the record's key
stands in the answer that the model writes (greedy, so that it is repeatable). Of a pair, the chosen answer is likelier than
the rejected one, both by the mean over their tokens. Of a plain text, which asks nothing, each token counts that the model
would have written next.
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
    """What one model got: mean loss per answer token in nats, its exponential, and the share that is right."""

    loss: float
    perplexity: float
    accuracy: float
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Likelihood:
    """Mean negative log-likelihood of the answer tokens in nats, and the share of them that are the likeliest next token."""

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
    """Of the answers; of pairs, the chosen ones.

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
        # A cache switches the mask between packed neighbours off (transformers 5.23).
        logits = model(**batch, use_cache=False).logits
        total += float(compute_token_losses(logits.flatten(0, 1), targets.flatten()).sum())
        right += int((logits.argmax(-1) == targets).sum())
        count += int((targets >= 0).sum())
    return Likelihood(total / count, right / count)


@torch.inference_mode()
def measure_preference_accuracy(model: PreTrainedModel, pairs: Sequence[PreferencePair]) -> float:
    """The share of pairs of which the model finds the chosen answer likelier than the rejected one."""
    right = 0
    for pair in pairs:
        chosen, rejected = mean_log_probabilities(model, move_to_device(collate_pairs([pair]), model)).tolist()
        right += chosen > rejected
    return right / len(pairs)


@torch.inference_mode()
def generate_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[str]:
    """Greedy answers, padded on the left so that every row of a batch ends where its answer begins.

    They end with the tokenizer's end token or with one that the model states: Gemma's and Llama 3's end a turn with another.
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
    """The batch where the model is."""
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


def tokenize_questions(
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    system_prompt: str | None,
    rendering: Rendering = CURRENT_RENDERING,
) -> list[Tokens | UnfitRecord]:
    """What each record asks with what should be answered, or why the chat template refuses it."""
    asked = [split_pair(record)[0] if record.layout is Layout.PREFERENCE else record for record in records]
    return tokenize_records(tokenizer, asked, system_prompt, rendering)


def select_answerable(
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    system_prompt: str | None,
    rendering: Rendering = CURRENT_RENDERING,
) -> tuple[list[Record], list[UnfitRecord]]:
    """The records that the chat template does not refuse, and of the others why it does."""
    found = tokenize_questions(tokenizer, records, system_prompt, rendering)
    fit = [record for record, tokens in zip(records, found, strict=True) if not isinstance(tokens, UnfitRecord)]
    return fit, [tokens for tokens in found if isinstance(tokens, UnfitRecord)]


def build_prompts(
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    system_prompt: str | None,
    rendering: Rendering = CURRENT_RENDERING,
) -> list[list[int]]:
    """What each record asks, as tokens. Raises BadConfiguration where the chat template refuses one."""
    prompts = []
    for tokens in tokenize_questions(tokenizer, records, system_prompt, rendering):
        if isinstance(tokens, UnfitRecord):
            raise BadConfiguration(f"a question {tokens}")
        prompts.append(prompt_tokens(tokens) or [tokenizer.eos_token_id])  # a plain text is asked for from nothing
    return prompts


def score_model(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    parameters: EvaluateParameters,
    rendering: Rendering = CURRENT_RENDERING,
) -> Scores:
    """Scores on `select_answerable` records of one layout; the answers are to the first `samples` of them, then to the
    questions.

    Raises:
        BadConfiguration: no record fits into the recipe's sequence_length, or the chat template refuses a question.
    """
    recipe, layout = parameters.recipe, records[0].layout
    found = measure_likelihood(model, tokenizer, records, recipe, rendering)
    asked = records[: parameters.samples]
    # Of which the answer is not read; there are templates that refuse an empty one.
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
    """An answer counts when the record's key stands in it as whole words."""
    return f" {normalize_text(record.key)} " in f" {normalize_text(answer)} "
