"""The trainer that gets its rows and losses from an objective."""

from collections.abc import Sequence
from typing import Any

import torch

from recipes.checkpoints.retention import VALIDATION_LOSS_KEY
from recipes.runner import Preempted
from recipes.training.data.examples import IGNORED_LABEL
from recipes.training.metrics.microbatch_metrics import MicrobatchMetrics, fetch_metrics
from recipes.training.metrics.validation_loss import EVAL_LOSS_KEY, combine_means, split_rows
from recipes.training.model import autocast_dtype
from recipes.training.objectives.objective import Loss, Objective, check_loss
from recipes.training.packed_attention import add_boundaries, uses_packed_attention
from recipes.training.precision import loss_scale, scale_gradient, unscale_gradients
from recipes.training.stopping import StopOnSignal
from recipes.training.trainer import CheckpointingTrainer

ROW_COUNT_KEY = "rows"
"""Number of rows in a micro-batch, where a step's rows cannot be divided evenly among processes.

For an empty micro-batch it is 0 and the process computes with a dummy row of no weight: collectives need all processes.
"""


class ObjectiveTrainer(CheckpointingTrainer):
    """Trainer for an `Objective`; logs the mean of its micro-batches' metrics with the step's loss."""

    def __init__(self, *args: Any, objective: Objective, stop: StopOnSignal, **kwargs: Any) -> None:
        uneven = objective.recipe.rows_per_step is not None
        self.objective = objective
        super().__init__(*args, data_collator=self._collate_partial if uneven else self._collate, **kwargs)
        self.stop = stop
        self._evaluation_pending = bool(self.args.eval_on_start)
        self.autocast_dtype = autocast_dtype(objective.recipe)
        self.scale = loss_scale(objective.recipe)
        unscale_gradients(self.model.parameters(), self.scale)
        self._microbatch_metrics: list[MicrobatchMetrics] = []
        self._token_counts: list[torch.Tensor] = []

    def _collate(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Collate on the host, including everything that would otherwise be read back from a GPU."""
        batch = self.objective.collate(rows)
        return add_boundaries(batch) if uses_packed_attention(self.model.config) else batch

    def _collate_partial(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Collate the rows that exist.

        An empty micro-batch gets a validation row instead, so that no training sample is drawn.
        """
        there = [row for row in rows if row is not None]
        return {**self._collate(there or [self.eval_dataset[0]]), ROW_COUNT_KEY: len(there)}

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        """Return how many target tokens the step has, over all processes."""
        return super()._get_num_items_in_batch([mask_empty_batch(batch) for batch in batch_samples], device)

    def compute_loss(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        recipe = self.objective.recipe
        rows = int(inputs.pop(ROW_COUNT_KEY, recipe.batch_size))
        if rows and not self.objective.packed:
            self._token_counts.append(count_read_tokens(inputs["labels"]))
        found = self._compute_loss_value(model, inputs, **kwargs)
        if isinstance(found, torch.Tensor):
            return scale_gradient(found if rows else found * 0, self.scale)
        # transformers divides by the accumulation steps only for a loss that is not already a share of the step's mean.
        self.model_accepts_loss_kwargs = False
        self._microbatch_metrics.append(MicrobatchMetrics(found.metrics, rows))
        # Logged as the mean over micro-batches; 1 if all have the same number of rows.
        step_fraction = rows / recipe.batch_size * recipe.max_rows_per_step / recipe.samples_per_step
        return scale_gradient(found.value * step_fraction, self.scale)

    def _compute_loss_value(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Loss | torch.Tensor:
        """Return the objective's loss, or the model's own as a tensor."""
        with torch.autocast(self.args.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            found = check_loss(self.objective, self.objective.loss(model, inputs), trains=torch.is_grad_enabled())
            return found or super().compute_loss(model, inputs, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            self.state.num_input_tokens_seen += self._count_step_tokens()
        if "loss" in logs and self._microbatch_metrics:
            gathered = self.group.all_gather(fetch_metrics(self._microbatch_metrics, self.args.device))
            logs |= {
                f"train/{name}": mean for name, mean in combine_means(part for parts in gathered for part in parts).items()
            }
            self._microbatch_metrics = []
        super().log(logs, *args, **kwargs)

    def _count_step_tokens(self) -> int:
        """Count the tokens that the processes read in a step.

        Packed rows count in full, padding included, other rows without padding.

        Preference pairs were once counted as `sequence_length` tokens, which overstated the throughput of short pairs
        tenfold.
        """
        if self.objective.packed:
            return self.objective.recipe.tokens_per_step
        own, self._token_counts = torch.stack(self._token_counts).tolist() if self._token_counts else [], []
        return sum(self.group.all_gather(sum(own))[:: self.group.model_parallel_size])

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate the validation split; loss and objective metrics are means over the whole split.

        transformers averages over micro-batches and repeats rows where the processes do not divide evenly. On a stop request
        all processes abort after the same micro-batch, because a long evaluation would not finish within the grace period.
        Nothing of it is logged then, and the resumed run evaluates first (`is_evaluation_due`).
        """
        first, self._evaluation_pending = self._evaluation_pending, False
        self.model.eval()
        group = self.group
        rows = split_rows(len(self.eval_dataset), self.args.per_device_eval_batch_size, group.data_rank, group.data_size)
        own = []
        for some in rows:
            if self.stop.any_stop_requested():
                return self._abort_evaluation(first)
            own.append(self._evaluate_batch(some))
        found = combine_means(
            part
            for parts in group.all_gather(fetch_metrics(own, self.args.device))[:: group.model_parallel_size]
            for part in parts
        )
        metrics = {EVAL_LOSS_KEY if name == "loss" else f"eval/{name}": value for name, value in found.items()}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if first and self.group.is_leader:
            self.checkpoints.update_metadata(self.state.global_step, {VALIDATION_LOSS_KEY: found["loss"]})
        return metrics

    def _abort_evaluation(self, first: bool) -> dict[str, float]:
        """Abort after a stop request.

        Raises:
            Preempted: this is the evaluation of the checkpoint just resumed from (`first`), so there is nothing to save.
        """
        if first:
            raise Preempted(f"checkpoint {self.state.global_step} holds everything but its evaluation")
        self.control.should_evaluate = False
        self.stop.stop(self.control, "stop requested: evaluation aborted", self.state.global_step)
        return {}

    @torch.no_grad()
    def _evaluate_batch(self, rows: range) -> MicrobatchMetrics:
        """Evaluate one micro-batch.

        Without rows the first row is computed with weight 0, because collectives need all processes.
        """
        batch = self._collate([self.eval_dataset[row] for row in rows or range(1)])
        following = batch.get("shift_labels", batch["labels"][:, 1:])
        predicted = int((following != IGNORED_LABEL).sum())  # on the host, without a GPU synchronization
        found = self._compute_loss_value(self.model, self._prepare_inputs(batch))
        if isinstance(found, Loss):
            return MicrobatchMetrics({"loss": found.value, **found.metrics}, len(rows))
        return MicrobatchMetrics({"loss": found}, predicted if rows else 0)


def count_read_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Count tokens up to each row's last target; the rest is padding.

    Returns a scalar tensor on the device, so that the caller decides when to synchronize.
    """
    places = torch.arange(1, labels.size(-1) + 1, device=labels.device)
    return (places * (labels != IGNORED_LABEL)).amax(-1).sum()


def mask_empty_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """Mask all labels of an empty micro-batch: nothing is learned from its dummy row."""
    if batch.get(ROW_COUNT_KEY) != 0:
        return batch
    labels: dict[str, Any] = {
        name: torch.full_like(batch[name], IGNORED_LABEL) for name in ("labels", "shift_labels") if name in batch
    }
    return {**batch, **labels}
