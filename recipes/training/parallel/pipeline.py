"""The trainer of a process that has one stage of the model: it gives a whole step at once to the schedule of all stages."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from recipes.training.objective_trainer import ObjectiveTrainer
from recipes.training.parallel.pipeline_stage import load_adapter, save_adapter, trained_of
from recipes.training.pipeline_schedule import BrokenOff, Pipeline


class PipelineTrainer(ObjectiveTrainer):
    """Its micro-batches are the schedule's, so that what the library takes for one are the rows of a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        recipe = self.objective.recipe
        self.pipeline = Pipeline(
            self.model,
            recipe,
            self.group,
            self.args.device,
            autocast=self.autocast_dtype,
            scale=self.scale,
            is_asked_to_stop=lambda: self.stop.requested,
        )

    def _wrap_model(self, model: Any, training: bool = True, dataloader: object = None) -> torch.nn.Module:
        """Another module than the model: the library takes its gradients for reduced, and wraps it no further."""
        return self.pipeline.module

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> None:
        """The schedule counts them: the library would add up those of all processes, which have the same rows."""
        return

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.model.train()
        return self.pipeline.step(self._prepare_inputs(inputs))

    def _run_epoch(self, model: Any, epoch: int, **given: Any) -> None:
        """With a step that is broken off, the library goes on as after a micro-batch of it that was not the last."""
        try:
            super()._run_epoch(model=model, epoch=epoch, **given)
        except BrokenOff:
            self.callback_handler.on_substep_end(self.args, self.state, self.control)
            told = (given["trial"], epoch, given["ignore_keys_for_eval"], given["start_time"])
            self._maybe_log_save_evaluate(self._tr_loss, None, model, *told)

    def _loss_of(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
        return self.pipeline.loss(inputs)

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        return self.pipeline.clip(self.args.max_grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not output_dir or not isinstance(self.model, PeftModel):
            super().save_model(output_dir, _internal_call)
            return
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if parts := self.group.gather(trained_of(self.model)):
            self.staging.later(parts, partial(save_adapter, self.model, folder=Path(output_dir)))

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if isinstance(self.model, PeftModel):
            load_adapter(self.model, Path(checkpoint))
        else:
            super()._load_from_checkpoint(checkpoint, model)
