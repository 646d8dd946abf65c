"""Hugging Face's Trainer, with checkpoints that can be trusted, and the arguments that a recipe makes for it."""

import json
from pathlib import Path

import torch
from pydantic import JsonValue
from transformers import Trainer, TrainingArguments

from hanzo_ml.buffer import MetricBuffer
from recipes.checkpoints import Checkpoints
from recipes.recipe import Recipe
from recipes.retention import VALIDATION_LOSS, from_the_best
from recipes.runner import say
from recipes.training.metrics import PENDING_METRICS
from recipes.training.samples import SAMPLES_SEEN, SamplesOfRun
from recipes.training.saving import validation_losses
from recipes.training.usage import USAGE, Meter

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw": "paged_adamw_32bit"}
"""The recipe's names in transformers; all but the first are those of bitsandbytes."""


class CheckpointingTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer with atomic, hashed checkpoints, and a place in the data that is a number of samples.

    The library writes straight into the final folder, so that a kill leaves half a checkpoint which it later takes for
    the latest. Here it writes into a scratch folder that gets its name only when it is whole.
    """

    def __init__(
        self,
        *args: object,
        checkpoints: Checkpoints,
        samples: SamplesOfRun,
        metrics: MetricBuffer,
        meter: Meter,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoints = checkpoints
        self.samples = samples
        self.metrics = metrics
        self.meter = meter
        self._scratch: Path | None = None

    def take_weights(self, folder: Path) -> None:
        """Those of a checkpoint, in place of the ones that training ended with."""
        self._load_from_checkpoint(str(folder))

    def _get_train_sampler(self, train_dataset: object = None) -> SamplesOfRun:
        return self.samples

    def _get_output_dir(self, trial: object) -> str:
        return str(self._scratch) if self._scratch else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        step = self.state.global_step
        losses = validation_losses(self.state)
        facts: dict[str, JsonValue] = {SAMPLES_SEEN: self.samples.seen(step)}
        if step in losses:
            facts[VALIDATION_LOSS] = losses[step]
        with self.meter.checkpoint(), self.checkpoints.writing(step, facts) as folder:
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
            (folder / USAGE).write_text(self.meter.read().model_dump_json())
        best = from_the_best(losses)[:1] == [step]
        say(f"checkpoint {step} saved" + (f", the best so far: validation loss {losses[step]:.4f}" if best else ""))


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
        optim=OPTIMIZERS[recipe.optimizer],
        activation_checkpointing=recipe.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False},
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
