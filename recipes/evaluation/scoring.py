"""What a model gets on held-out records: the loss of their answers, and how many it gets right.

What "right" means depends on the layout (`recipes.records.layouts`). Where something is asked, the record's key stands in the
answer that the model writes (greedy, so that it is repeatable). Of a pair, the chosen answer is likelier than the rejected
one, both by the mean over their tokens. Of a plain text, which asks nothing, each token counts that the model would have
written next.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import EvaluateParameters
from recipes.contracts.recipe import Recipe
from recipes.preparation.tokenization.record_tokenizer import Tokens
from recipes.records.layouts import Layout, Unfit
from recipes.records.record_reader import Record, is_correct
from recipes.runner import say
from recipes.training.data.examples import encode, prompt_of, tokenize
from recipes.training.data.preference_pairs import Batch, Pair, encode_pairs, mean_log_probabilities, of_pairs, stack
from recipes.training.packing import collate, pack
from recipes.training.token_loss import token_losses

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
def likelihood(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], recipe: Recipe
) -> Likelihood:
    """Of the answers; of pairs, the chosen ones.

    Raises:
        BadConfiguration: no record has an answer that fits into the recipe's sequence_length.
    """
    chosen = [of_pairs(record)[0] if record.layout is Layout.PREFERENCE else record for record in records]
    total, right, count = 0.0, 0, 0
    for row in pack(
        encode(tokenizer, chosen, recipe.system_prompt, recipe.sequence_length),
        recipe.sequence_length,
        tokenizer.eos_token_id,
    ):
        batch = placed(collate([vars(row)]), model)
        del batch["labels"]
        targets = batch.pop("shift_labels")
        # A cache switches the mask between packed neighbours off (transformers 5.23).
        logits = model(**batch, use_cache=False).logits
        total += float(token_losses(logits.flatten(0, 1), targets.flatten()).sum())
        right += int((logits.argmax(-1) == targets).sum())
        count += int((targets >= 0).sum())
    return Likelihood(total / count, right / count)


@torch.inference_mode()
def preferred(model: PreTrainedModel, pairs: Sequence[Pair]) -> float:
    """The share of pairs of which the model finds the chosen answer likelier than the rejected one."""
    right = 0
    for pair in pairs:
        chosen, rejected = mean_log_probabilities(model, placed(stack([pair]), model)).tolist()
        right += chosen > rejected
    return right / len(pairs)


@torch.inference_mode()
def generate(
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
            **placed({"input_ids": tokens, "attention_mask": mask}, model),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=sorted(ends),
        )
        answers += [text.strip() for text in tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)]
    return answers


def placed(batch: Batch, model: PreTrainedModel) -> Batch:
    """The batch where the model is."""
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


def encoded(
    tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], system_prompt: str | None
) -> list[Tokens | Unfit]:
    """What each record asks with what should be answered, or why the chat template refuses it."""
    asked = [of_pairs(record)[0] if record.layout is Layout.PREFERENCE else record for record in records]
    return tokenize(tokenizer, asked, system_prompt)


def answerable(
    tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], system_prompt: str | None
) -> tuple[list[Record], list[Unfit]]:
    """The records that the chat template does not refuse, and of the others why it does."""
    found = encoded(tokenizer, records, system_prompt)
    fit = [record for record, tokens in zip(records, found, strict=True) if not isinstance(tokens, Unfit)]
    return fit, [tokens for tokens in found if isinstance(tokens, Unfit)]


def prompts_of(tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], system_prompt: str | None) -> list[list[int]]:
    """What each record asks, as tokens. Raises BadConfiguration where the chat template refuses one."""
    prompts = []
    for tokens in encoded(tokenizer, records, system_prompt):
        if isinstance(tokens, Unfit):
            raise BadConfiguration(f"a question {tokens}")
        prompts.append(prompt_of(tokens) or [tokenizer.eos_token_id])  # a plain text is asked for from nothing
    return prompts


def score(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    parameters: EvaluateParameters,
) -> Scores:
    """Scores on `answerable` records of one layout; the answers are to the first `samples` of them, then to the questions.

    Raises:
        BadConfiguration: no record fits into the recipe's sequence_length, or the chat template refuses a question.
    """
    recipe, layout = parameters.recipe, records[0].layout
    found = likelihood(model, tokenizer, records, recipe)
    asked = records[: parameters.samples]
    # Of which the answer is not read; there are templates that refuse an empty one.
    questions = [Record({"instruction": text, "answer": "A"}, Layout.INSTRUCTION) for text in parameters.questions]
    prompts = prompts_of(tokenizer, [*asked, *questions], recipe.system_prompt)
    answers = generate(model, tokenizer, prompts, parameters.max_new_tokens)
    if layout is Layout.PREFERENCE:
        accuracy = preferred(model, encode_pairs(tokenizer, records, recipe))
    elif layout is Layout.TEXT:
        accuracy = found.next_token_accuracy
    else:
        right = sum(is_correct(record, answer) for record, answer in zip(asked, answers, strict=False))
        accuracy = right / len(asked)
    perplexity = math.exp(min(found.loss, 700.0)) if math.isfinite(found.loss) else math.inf
    say(f"{name}: loss {found.loss:.4f}, perplexity {perplexity:.3f}, accuracy {accuracy:.3f}")
    return Scores(loss=found.loss, perplexity=perplexity, accuracy=accuracy, answers=tuple(answers))
