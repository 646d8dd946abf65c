"""The trainer that takes rows and losses from an objective."""

from collections import defaultdict
from typing import Any

import torch

from recipes.examples import IGNORED
from recipes.retention import VALIDATION_LOSS
from recipes.runner import Preempted, say
from recipes.training.held_out import Part, share, together
from recipes.training.model import autocast_dtype
from recipes.training.objectives.objective import Loss, Objective
from recipes.training.stopping import StopOnSignal
from recipes.training.trainer import CheckpointingTrainer


class ObjectiveTrainer(CheckpointingTrainer):
    """What an objective tells of its micro-batches is logged as their mean, beside the loss that they belong to."""

    def __init__(self, *args: Any, objective: Objective, stop: StopOnSignal, **kwargs: Any) -> None:
        super().__init__(*args, data_collator=objective.collate, **kwargs)
        self.objective = objective
        self.stop = stop
        self._owes_evaluation = bool(self.args.eval_on_start)
        self.autocast_dtype = autocast_dtype(objective.recipe)
        self._told: dict[str, list[float]] = defaultdict(list)

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
        found = self._loss_of(model, inputs, **kwargs)
        if isinstance(found, torch.Tensor):
            return found
        # The library divides by the accumulation itself only where a loss is not said to be a part of the step's mean.
        self.model_accepts_loss_kwargs = False
        for name, value in found.metrics.items():
            self._told[name].append(value)
        return found.value

    def _loss_of(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Loss | torch.Tensor:
        """The objective's, or the model's own, as a tensor."""
        with torch.autocast(self.args.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return self.objective.loss(model, inputs) or super().compute_loss(model, inputs, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            for name in sorted(self._told):
                values = [value for told in self.group.collect(self._told.pop(name)) for value in told]
                logs[name] = sum(values) / len(values)
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The loss of the validation split and what the objective tells of it, each a mean over the whole split.

        The library's is a mean over micro-batches, and repeats rows where the processes do not come out even. Asked to stop,
        all processes break it off after the same micro-batch: a long one would not end before they are killed. Then nothing
        of it is logged, and whoever resumes does it first (`held_out.owed`).
        """
        first, self._owes_evaluation = self._owes_evaluation, False
        self.model.eval()
        rows = share(len(self.eval_dataset), self.args.per_device_eval_batch_size, self.group.rank, self.group.size)
        own = []
        for some in rows:
            if self.stop.asked():
                return self._break_off(first)
            own.append(self._part(some))
        found = together(part for parts in self.group.collect(own) for part in parts)
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if first and self.group.leads:
            self.checkpoints.tell(self.state.global_step, {VALIDATION_LOSS: found["loss"]})
        return metrics

    def _break_off(self, first: bool) -> dict[str, float]:
        """Raises Preempted where the checkpoint that is due is there: the `first` one is of weights that come from it."""
        if first:
            raise Preempted(f"checkpoint {self.state.global_step} holds everything but its evaluation")
        say("asked to stop: the evaluation is broken off, saving a checkpoint first")
        self.control.should_evaluate = False
        self.control.should_save = self.control.should_training_stop = True
        return {}

    @torch.no_grad()
    def _part(self, rows: range) -> Part:
        """Of no rows: the first, without weight, for the others compute at the same time."""
        batch = self._prepare_inputs(self.objective.collate([self.eval_dataset[row] for row in rows or range(1)]))
        found = self._loss_of(self.model, batch)
        if isinstance(found, Loss):
            return Part({"loss": float(found.value), **found.metrics}, len(rows))
        following = batch.get("shift_labels", batch["labels"][:, 1:])
        return Part({"loss": float(found)}, int((following != IGNORED).sum()) if rows else 0)
