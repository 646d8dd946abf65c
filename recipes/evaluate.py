"""The program evaluate.

Score the base, the tuned and the last accepted model on the same records. Scoring is in `recipes.evaluation.scoring`; the
gate decides what scores mean.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from recipes.contracts.quantities import pluralize
from recipes.startup import prepare_imports

if __name__ == "__main__":
    prepare_imports()

import torch
from peft import PeftModel
from pydantic import JsonValue
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.contracts.parameters import EvaluateParameters
from recipes.contracts.recipe import Recipe
from recipes.contracts.results import find_trained_role
from recipes.evaluation.scoring import Scores, score_model, select_answerable
from recipes.machine import usable_cores
from recipes.records.record_reader import Record, read_records
from recipes.runner import log_line, main
from recipes.storage.artifact_store import Store
from recipes.training.precision import log_dtype_fallback, select_compute_device, select_compute_dtype


def load_model(folder: Path, recipe: Recipe) -> PreTrainedModel:
    """Load a whole model in the recipe's compute dtype, on GPUs if there are any.

    It is spread over all GPUs, and host memory if they are too small: a model trained in NF4 or in shards is complete here,
    and may not fit on one GPU.
    """
    device = select_compute_device()
    dtype = select_compute_dtype(recipe.computing_dtype, device)
    place = "auto" if device.type == "cuda" else None
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=place).eval()


def finite_or_none(value: float) -> float | None:
    """Return a number, or None if it is not finite.

    JSON has null instead, which the gate rejects.
    """
    return value if math.isfinite(value) else None


def evaluate(job: Job, store: Store, work: Path) -> Result:
    """Score the models.

    Inputs: `base`, `adapter` or `weights`, `test`, and `accepted` (either) if there is one. Records that the chat template
    rejects are left out, as in training: otherwise they would end the evaluation.

    Raises:
        BadConfiguration: no record of the test split is left.
    """
    parameters = EvaluateParameters.model_validate(job.parameters)
    cache = Path(job.cache_dir)
    log_dtype_fallback(parameters.recipe.computing_dtype)
    torch.set_num_threads(usable_cores(job.hardware.cpu))
    test_records = read_records(store.fetch(job.inputs["test"], cache))
    folder = store.fetch(job.inputs["base"], cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    records, refused = select_answerable(tokenizer, test_records, parameters.recipe.system_prompt, job.rendering)
    if refused:
        log_line(f"{len(refused)} of {pluralize(len(test_records), 'test record')} left out: the first {refused[0]}")
    if not records:
        raise BadConfiguration(f"no record of the test split can be used{f': the first {refused[0]}' if refused else ''}")
    model = load_model(folder, parameters.recipe)
    scores = {"base": score_model("base", model, tokenizer, records, parameters, job.rendering)}
    tuned = {"accepted": job.inputs.get("accepted"), "tuned": job.inputs[find_trained_role(job.inputs)]}
    for name, artifact in tuned.items():
        if artifact is None:
            continue
        place = store.fetch(artifact, cache)
        if artifact.kind == "weights":
            scores[name] = score_model(
                name, load_model(place, parameters.recipe), tokenizer, records, parameters, job.rendering
            )
        else:
            adapted = PeftModel.from_pretrained(model, place).eval()
            scores[name] = score_model(name, adapted, tokenizer, records, parameters, job.rendering)
            model = adapted.unload()
    report = build_report(records[: parameters.samples], scores, parameters) | {"left_out": len(refused)}
    out = work / "evaluation"
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False, sort_keys=True), encoding="utf-8")
    inputs = {role: artifact.digest for role, artifact in job.inputs.items()}
    artifact = store.publish(out, job.outputs["evaluation"], "evaluation", inputs=inputs)
    scored = scores["tuned"]
    return Result(
        work_digest=job.work_digest,
        artifacts={"evaluation": artifact},
        metrics={
            name: value
            for name, value in (
                ("loss", scored.loss),
                ("perplexity", scored.perplexity),
                ("accuracy", scored.accuracy),
            )
            if math.isfinite(value)
        },
        facts={"report": report},
    )


def build_report(
    records: Sequence[Record], scores: dict[str, Scores], parameters: EvaluateParameters
) -> dict[str, JsonValue]:
    """Build the report: scores by model, and each question with all models' answers."""
    samples: list[JsonValue] = []
    for index, record in enumerate(records):
        answers: dict[str, JsonValue] = {name: scored.answers[index] for name, scored in scores.items()}
        samples.append({"instruction": record.instruction, "expected": record.answer, "key": record.key, "answers": answers})
    questions: list[JsonValue] = []
    for index, question in enumerate(parameters.questions):
        answers = {name: scored.answers[len(records) + index] for name, scored in scores.items()}
        questions.append({"instruction": question, "answers": answers})
    measured: dict[str, JsonValue] = {
        name: {
            "loss": finite_or_none(scored.loss),
            "perplexity": finite_or_none(scored.perplexity),
            "accuracy": scored.accuracy,
        }
        for name, scored in scores.items()
    }
    return {"scores": measured, "num_records": len(records), "samples": samples, "questions": questions}


if __name__ == "__main__":
    main(evaluate)
