"""The program evaluate: score the base, the tuned and the last accepted model on the same held-out records.

Measures loss and perplexity of the reference answers, and accuracy: whether the record's key stands in the answer that
the model writes (greedy, so that it is repeatable). What the scores mean for the model is the gate's business.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from pydantic import JsonValue
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipes.arithmetic import computing_dtype
from recipes.parameters import EvaluateParameters
from recipes.recipe import Recipe
from recipes.records import Record, encode, is_correct, prompt_tokens, read_records
from recipes.results import trained_role
from recipes.runner import main, say
from recipes.schema import Job, Result
from recipes.store import Store
from recipes.training.packing import collate, pack

GENERATION_BATCH = 16


@dataclass(frozen=True)
class Scores:
    """What one model got: mean loss per answer token in nats, its exponential, and the share of right answers."""

    loss: float
    perplexity: float
    accuracy: float
    answers: tuple[str, ...]


@torch.inference_mode()
def mean_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], recipe: Recipe
) -> float:
    """Mean negative log-likelihood of the answer tokens, in nats.

    Raises:
        BadConfiguration: no record has an answer that fits into the recipe's sequence_length.
    """
    examples = encode(tokenizer, records, recipe.system_prompt, recipe.sequence_length)
    total, count = 0.0, 0
    for row in pack(examples, recipe.sequence_length, tokenizer.eos_token_id):
        batch = collate([vars(row)])
        labels = batch.pop("labels")
        # A cache switches the mask between packed neighbours off (transformers 5.23).
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        targets = labels[:, 1:]
        total += float(torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="sum"))
        count += int((targets >= 0).sum())
    return total / count


@torch.inference_mode()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, instructions: Sequence[str], parameters: EvaluateParameters
) -> list[str]:
    """Greedy answers, padded on the left so that every row of a batch ends where its answer begins."""
    answers: list[str] = []
    for start in range(0, len(instructions), GENERATION_BATCH):
        prompts = [
            prompt_tokens(tokenizer, text, parameters.recipe.system_prompt)
            for text in instructions[start : start + GENERATION_BATCH]
        ]
        longest = max(map(len, prompts))
        tokens = torch.tensor([[tokenizer.eos_token_id] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=parameters.max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        answers += [text.strip() for text in tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)]
    return answers


def score(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    parameters: EvaluateParameters,
) -> Scores:
    loss = mean_loss(model, tokenizer, records, parameters.recipe)
    asked = records[: parameters.samples]
    answers = generate(model, tokenizer, [*(record.instruction for record in asked), *parameters.questions], parameters)
    right = sum(is_correct(record, answer) for record, answer in zip(asked, answers, strict=False))
    perplexity = math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf
    say(f"{name}: loss {loss:.4f}, perplexity {perplexity:.3f}, accuracy {right / len(asked):.3f}")
    return Scores(loss=loss, perplexity=perplexity, accuracy=right / len(asked), answers=tuple(answers))


def load(folder: Path, recipe: Recipe) -> PreTrainedModel:
    """A whole model in the type that the recipe computes in."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=computing_dtype(recipe.computing_dtype)).eval()


def finite(value: float) -> float | None:
    """A number as JSON knows it: infinity and NaN become null, which the gate refuses."""
    return value if math.isfinite(value) else None


def evaluate(job: Job, store: Store, work: Path) -> Result:
    """Score. Inputs: `base`, `adapter` or `weights`, `test`, and `accepted` (either) when a version was accepted before."""
    parameters = EvaluateParameters.model_validate(job.parameters)
    cache = Path(job.cache_dir)
    torch.set_num_threads(job.hardware.cpu or os.cpu_count() or 1)
    records = read_records(store.fetch(job.inputs["test"], cache))
    folder = store.fetch(job.inputs["base"], cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load(folder, parameters.recipe)
    scores = {"base": score("base", model, tokenizer, records, parameters)}
    tuned = {"accepted": job.inputs.get("accepted"), "tuned": job.inputs[trained_role(job.inputs)]}
    for name, artifact in tuned.items():
        if artifact is None:
            continue
        place = store.fetch(artifact, cache)
        if artifact.kind == "weights":
            scores[name] = score(name, load(place, parameters.recipe), tokenizer, records, parameters)
        else:
            adapted = PeftModel.from_pretrained(model, place).eval()
            scores[name] = score(name, adapted, tokenizer, records, parameters)
            model = adapted.unload()
    report = build_report(records[: parameters.samples], scores, parameters)
    out = work / "evaluation"
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False, sort_keys=True))
    inputs = {role: artifact.digest for role, artifact in job.inputs.items()}
    artifact = store.publish(out, job.outputs["evaluation"], "evaluation", inputs=inputs)
    got = scores["tuned"]
    return Result(
        work_digest=job.work_digest,
        artifacts={"evaluation": artifact},
        metrics={
            name: value
            for name, value in (
                ("loss", got.loss),
                ("perplexity", got.perplexity),
                ("accuracy", got.accuracy),
            )
            if math.isfinite(value)
        },
        facts={"report": report},
    )


def build_report(
    records: Sequence[Record], scores: dict[str, Scores], parameters: EvaluateParameters
) -> dict[str, JsonValue]:
    """Scores by model, and every asked question with each model's answer."""
    samples: list[JsonValue] = []
    for index, record in enumerate(records):
        answers: dict[str, JsonValue] = {name: got.answers[index] for name, got in scores.items()}
        samples.append({"instruction": record.instruction, "expected": record.answer, "key": record.key, "answers": answers})
    questions: list[JsonValue] = []
    for index, question in enumerate(parameters.questions):
        answers = {name: got.answers[len(records) + index] for name, got in scores.items()}
        questions.append({"instruction": question, "answers": answers})
    measured: dict[str, JsonValue] = {
        name: {"loss": finite(got.loss), "perplexity": finite(got.perplexity), "accuracy": got.accuracy}
        for name, got in scores.items()
    }
    return {"scores": measured, "num_records": len(records), "samples": samples, "questions": questions}


if __name__ == "__main__":
    main(evaluate)
