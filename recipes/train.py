"""The program train: fine-tune a base model with a recipe, from wherever the run's last valid checkpoint is.

Resuming is bit-exact: the same losses and the same final weights as a run that nobody killed. Everything that decides a
number (weights, optimizer, schedule, random states, place in the data) is in the checkpoint; everything else is derived
from the job.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hanzo_ml.buffer import MetricBuffer
from hanzo_ml.points import Point
from recipes import base_model
from recipes.arithmetic import computing_dtype
from recipes.checkpoints import Checkpoints
from recipes.packing import collate, pack
from recipes.parameters import TrainParameters
from recipes.prepared_rows import PreparedRows, is_prepared
from recipes.recipe import Recipe
from recipes.records import encode, read_records
from recipes.results import TrainingFacts
from recipes.runner import Preempted, main, say
from recipes.schema import Artifact, BadConfiguration, Job, Result
from recipes.store import Store
from recipes.trainable import refuse_what_is_missing
from recipes.training_callbacks import CheckpointWhenDue, LogToTracking, StopOnSignal

PENDING_METRICS = "pending_metrics.json"
METRICS_GRACE_SECONDS = 600
"""How long a finished run waits for a tracking server that is down, before it ends without its last points."""


class CheckpointingTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer with atomic, hashed checkpoints.

    The library writes straight into the final folder, so that a kill leaves half a checkpoint which it later takes for
    the latest. Here it writes into a scratch folder that gets its name only when it is whole.
    """

    def __init__(self, *args: object, checkpoints: Checkpoints, metrics: MetricBuffer, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoints = checkpoints
        self.metrics = metrics
        self._scratch: Path | None = None

    def _get_output_dir(self, trial: object) -> str:
        return str(self._scratch) if self._scratch else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        step = self.state.global_step
        with self.checkpoints.writing(step) as folder:
            self._scratch = folder
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._scratch = None
            inner = folder / f"checkpoint-{step}"
            for file in inner.iterdir():
                file.rename(folder / file.name)
            inner.rmdir()
            # Points that the tracking server has not acknowledged yet belong to the state of the run.
            (folder / PENDING_METRICS).write_text(json.dumps([point.to_json() for point in self.metrics.pending()]))
        say(f"checkpoint {step} saved")


def train(job: Job, store: Store, work: Path) -> Result:
    """Fine-tune. Inputs: `run`, `train`, `validation`. Outputs: `checkpoints`, `adapter`.

    Raises:
        BadConfiguration: the recipe does not fit the model or the data, or asks for what this program cannot do.
        Preempted: SIGTERM came; a checkpoint was saved.
    """
    recipe = TrainParameters.model_validate(job.parameters).recipe
    refuse_what_is_missing(recipe)
    cache = Path(job.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(job.hardware.cpu or os.cpu_count() or 1)
    base = base_model.resolve(recipe.base_model, store, cache)
    folder = store.fetch(base, cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = {split: packed(job.inputs[split], store, cache, tokenizer, recipe) for split in ("train", "validation")}

    set_seed(recipe.seed)
    model = load_for_training(folder, recipe)
    checkpoints = Checkpoints(work / "checkpoints", store, job.outputs["checkpoints"], job.checkpoint.keep_last)
    resume = checkpoints.latest()
    metrics = open_metrics(job, resume)
    # The run's own statement: how a resumed process differs from a fresh one is visible in its log.
    say(f"resuming from checkpoint {resume[0]} of {recipe.max_steps}" if resume else f"starting {recipe.max_steps} steps")

    stop = StopOnSignal()
    trainer = CheckpointingTrainer(
        model=model,
        args=arguments(recipe, work),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[CheckpointWhenDue(job.checkpoint), stop, LogToTracking(metrics)],
        checkpoints=checkpoints,
        metrics=metrics,
    )
    trainer.remove_callback(PrinterCallback)
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=str(resume[1]) if resume else None)
    seconds = time.monotonic() - started
    checkpoints.wait()
    lost = metrics.close(timeout=30 if stop.requested else METRICS_GRACE_SECONDS)
    if stop.requested and trainer.state.global_step < recipe.max_steps:
        raise Preempted(f"checkpoint {trainer.state.global_step} holds everything")
    if lost:
        say(f"{len(lost)} metric points could not be sent: the tracking server did not answer")
    adapter = publish_adapter(trainer.model, tokenizer, store, job, base, work)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return Result(
        work_digest=job.work_digest,
        artifacts={"adapter": adapter, "base": base},
        metrics={"total_steps": float(trainer.state.global_step)},
        facts=TrainingFacts(
            train_seconds=round(seconds, 3),
            resumed_from=resume[0] if resume else None,
            unsent_metrics=len(lost),
            losses={step: loss if math.isfinite(loss) else None for step, loss in losses.items()},
        ).model_dump(mode="json"),
    )


def packed(
    split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> Sequence[dict[str, torch.Tensor]] | PreparedRows:
    """The rows to train on: of a prepared split as they are stored, of any other tokenized and packed here."""
    folder = store.fetch(split, cache)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if is_prepared(folder):
        prepared = PreparedRows(folder, store.manifest(split), tokenizer, recipe, padding)
        say(f"{prepared.num_records} prepared records, {prepared.num_tokens} tokens, {len(prepared)} rows")
        return prepared
    records = read_records(folder)
    examples = encode(tokenizer, records, recipe.system_prompt, recipe.sequence_length)
    rows = pack(examples, recipe.sequence_length, padding)
    say(f"{len(examples)} records, {sum(len(example.tokens) for example in examples)} tokens, {len(rows)} rows")
    return [vars(row) for row in rows]


def load_for_training(folder: Path, recipe: Recipe) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=computing_dtype(recipe.base_dtype), attn_implementation="sdpa"
    )
    lora = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=list(recipe.lora_target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, lora)
    except ValueError as error:
        raise BadConfiguration(f"recipe '{recipe.name}' does not fit its base model: {error}") from None


def arguments(recipe: Recipe, work: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(work / "trainer"),
        max_steps=recipe.max_steps,
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=int(recipe.warmup_ratio * recipe.max_steps),
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        eval_strategy="steps" if recipe.eval_steps else "no",
        eval_steps=recipe.eval_steps,
        prediction_loss_only=True,
        logging_steps=1,
        logging_nan_inf_filter=False,  # the filter would show the last good loss in place of a NaN
        save_strategy="no",  # `CheckpointWhenDue` asks for checkpoints
        seed=recipe.seed,
        data_seed=recipe.seed,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )


def open_metrics(job: Job, resume: tuple[int, Path] | None) -> MetricBuffer:
    """The buffer to log into; on a resumed run it knows what its predecessor could not send, and what the server has."""
    if job.tracking is None:
        raise BadConfiguration("a training job needs `tracking`: the run that it logs to")
    metrics = MetricBuffer(job.tracking.uri, job.tracking.run_id)
    if resume:
        step, folder = resume
        metrics.restore([Point.from_json(point) for point in json.loads((folder / PENDING_METRICS).read_text())])
        metrics.skip_until(step)
    return metrics


def publish_adapter(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, store: Store, job: Job, base: Artifact, work: Path
) -> Artifact:
    """The final adapter with its tokenizer. Its digest depends on the training alone, not on the place or the time."""
    folder = work / "adapter"
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["base_model_name_or_path"] = base.uri
    config["target_modules"] = sorted(config["target_modules"])  # a set in the library: its order differs by process
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True))
    tokenizer.save_pretrained(folder)
    inputs = {role: job.inputs[role].digest for role in ("run", "train", "validation")} | {"base": base.digest}
    return store.publish(folder, job.outputs["adapter"], "adapter", inputs=inputs)


if __name__ == "__main__":
    main(train)
