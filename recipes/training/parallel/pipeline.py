"""Pipeline parallelism: the micro-batch schedule and its trainer."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from recipes.contracts.recipe import Recipe
from recipes.planning.parallel_layout import runs_1f1b
from recipes.training.data.examples import IGNORED_LABEL
from recipes.training.data.packing import find_learned_positions
from recipes.training.objective_trainer import ObjectiveTrainer
from recipes.training.parallel.pipeline_stage import causal_model, load_adapter, save_adapter, trained_weights
from recipes.training.parallel.process_group import ProcessGroup
from recipes.training.precision import scale_gradient

# The schedule of a step's micro-batches through the pipeline stages (`recipes.planning.parallel_layout`).
#
# Until a step ends, stages are in the middle of each other's micro-batches, so none can leave early. After a stop request a
# stage stops computing and sends tensors of the right shape: the rest of a step that takes minutes is done in a moment, and
# all stages discard it.


class StepAborted(Exception):
    """A stage received a stop request during a step; the step's gradients are incomplete."""


class StageModule(nn.Module):
    """One stage: maps tokens (first stage) or the previous stage's output to hidden states.

    `skipped` is true if part of this step was not computed. Evaluations are always computed, since their numbers count.
    """

    def __init__(
        self, model: Any, *, first: bool, autocast: torch.dtype | None, is_stop_requested: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.model = model
        self.first = first
        self.autocast_dtype = autocast
        self.is_stop_requested = is_stop_requested
        self.skipped = False

    def should_skip(self) -> bool:
        self.skipped |= torch.is_grad_enabled() and self.is_stop_requested()
        return self.skipped

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def forward(self, given: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.should_skip():
            if not self.first:
                return given * 1  # keeps the graph: the previous stage waits for the gradient
            shape = (*given.shape, causal_model(self.model).config.hidden_size)
            return torch.zeros(shape, dtype=self.model.dtype, device=given.device, requires_grad=True)
        named = {"input_ids" if self.first else "inputs_embeds": given}
        with self.autocast(given.device):
            found = causal_model(self.model).model(**named, position_ids=position_ids, use_cache=False)
        hidden: torch.Tensor = found.last_hidden_state
        return hidden

    def loss(
        self, hidden: torch.Tensor, places: torch.Tensor, next_tokens: torch.Tensor, items: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the model's loss in the last stage.

        Args:
            places: positions whose next token is learned.
            next_tokens: the tokens at the positions after `places`.
            items: divisor of the sum; None for the mean over the learned tokens given here.
        """
        if self.should_skip():
            return hidden.float().sum() * 0
        causal = causal_model(self.model)
        with self.autocast(hidden.device):
            logits = causal.lm_head(hidden[:, places])
            found: torch.Tensor = causal.loss_function(
                logits=logits,
                labels=None,
                vocab_size=causal.config.vocab_size,
                shift_labels=next_tokens,
                num_items_in_batch=items,
            )
        return found


class Pipeline:
    """The stage of this process and its communication. All processes must call every method together."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        group: ProcessGroup,
        device: torch.device,
        autocast: torch.dtype | None,
        scale: float,
        is_stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.group, self.rank, self.stages, self.device = group, group.rank, group.size, device
        self.last = group.size - 1
        first = group.rank == 0
        self.module = StageModule(model, first=first, autocast=autocast, is_stop_requested=is_stop_requested)
        self.scale = scale
        config = causal_model(model).config
        self.hidden_size, self.dtype = config.hidden_size, model.dtype
        # A head tied to the embedding is trained in two stages: their gradients are summed.
        is_tied = config.tie_word_embeddings and recipe.method == "full"
        self._tied_weights_group = dist.new_group([0, self.last]) if is_tied else None
        self._rows = recipe.batch_size
        self._schedule = self._make_schedule(recipe)
        self._num_learned_tokens: torch.Tensor | None = None
        self._targets: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())

    def _make_schedule(self, recipe: Recipe) -> Schedule1F1B | ScheduleGPipe:
        """Create the schedule with explicit shapes.

        Otherwise each process computes an extra micro-batch to infer them.
        """
        tokens = torch.empty(recipe.batch_size, recipe.sequence_length, dtype=torch.int64, device="meta")
        hidden = torch.empty(*tokens.shape, self.hidden_size, dtype=self.dtype, device="meta", requires_grad=True)
        stage = PipelineStage(
            self.module,
            self.rank,
            self.stages,
            self.device,
            input_args=tokens if self.rank == 0 else hidden,
            output_args=hidden,
        )
        kind = Schedule1F1B if runs_1f1b(recipe) else ScheduleGPipe
        return kind(stage, recipe.gradient_accumulation, loss_fn=self._loss, scale_grads=False)

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return scale_gradient(self.module.loss(hidden, *next(self._targets), self._num_learned_tokens), self.scale)

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute gradients of all micro-batches of a step. Returns the step's loss in every process.

        Raises:
            StepAborted: in every process; one of them received a stop request and skipped part of the step.
        """
        labels = batch["labels"]
        self.module.skipped = False
        self._num_learned_tokens = (labels[:, 1:] != IGNORED_LABEL).sum()
        given = (batch["input_ids"],) if self.rank == 0 else ()
        target = labels if self.rank == self.last else None
        # before the first micro-batch: counting synchronizes with the GPU, which would stall the schedule
        if self.rank == self.last:
            self._targets = iter([find_learned_positions(part) for part in torch.split(labels, self._rows)])
        losses: list[torch.Tensor] = []
        # Disabled, but around all micro-batches: otherwise each of them caches its own 16-bit copies of the weights.
        with torch.autocast(self.device.type, enabled=False):
            try:
                self._schedule.step(
                    *given, position_ids=batch["position_ids"], target=target, losses=losses, return_outputs=False
                )
            except RuntimeError as error:  # the schedule's own error, which hides an out-of-memory error
                if error.__cause__ is None:
                    raise
                raise error.__cause__ from None
        if self.group.any(self.module.skipped):
            raise StepAborted
        self._reduce_tied_gradients()
        return self._broadcast_from_last(torch.stack([loss.detach() for loss in losses]).sum() if losses else None)

    @torch.no_grad()
    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss over a batch's learned tokens, without gradients; any number of rows."""
        tokens = batch["input_ids"]
        given = tokens
        if self.rank > 0:
            given = torch.empty(*tokens.shape, self.hidden_size, dtype=self.dtype, device=self.device)
            dist.recv(given, self.rank - 1)
        hidden = self.module(given, batch["position_ids"])
        if self.rank < self.last:
            dist.send(hidden.contiguous(), self.rank + 1)
            return self._broadcast_from_last(None)
        return self._broadcast_from_last(self.module.loss(hidden, *find_learned_positions(batch["labels"]), None))

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip gradients to a norm over all stages. Returns the norm before clipping."""
        trained = [weight for weight in self.module.parameters() if weight.grad is not None]
        counted = [weight for weight in trained if weight is not self._tied_embedding()]
        norm = get_total_norm([weight.grad for weight in counted if weight.grad is not None])
        squares = norm.to(self.device, torch.float32) ** 2
        dist.all_reduce(squares)
        total = squares.sqrt()
        clip_grads_with_norm_(trained, max_norm, total)
        return total

    def _broadcast_from_last(self, value: torch.Tensor | None) -> torch.Tensor:
        result = torch.zeros((), device=self.device) if value is None else value.to(self.device, torch.float32).clone()
        dist.broadcast(result, self.last)
        return result

    def _reduce_tied_gradients(self) -> None:
        if self._tied_weights_group is not None and self.rank in (0, self.last):
            embedding = causal_model(self.module.model).model.embed_tokens.weight
            dist.all_reduce(embedding.grad, group=self._tied_weights_group)

    def _tied_embedding(self) -> torch.Tensor | None:
        """Return the last stage's copy of a tied weight: norms must count it once."""
        if self._tied_weights_group is None or self.rank != self.last:
            return None
        weight: torch.Tensor = causal_model(self.module.model).model.embed_tokens.weight
        return weight


class PipelineTrainer(ObjectiveTrainer):
    """Trainer for pipelines; transformers sees the rows of a whole step as one micro-batch."""

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
            is_stop_requested=lambda: self.stop.is_requested,
        )

    def _wrap_model(self, model: Any, training: bool = True, dataloader: object = None) -> torch.nn.Module:
        """Return a module other than the model, so that transformers does not wrap it."""
        return self.pipeline.module

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> None:
        """Disabled: the schedule counts tokens, and all processes have the same rows."""
        return

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.model.train()
        return self.pipeline.step(self._prepare_inputs(inputs))

    def _run_epoch(self, model: Any, epoch: int, **given: Any) -> None:
        """Treat an aborted step like a micro-batch that does not end its step."""
        try:
            super()._run_epoch(model=model, epoch=epoch, **given)
        except StepAborted:
            self.callback_handler.on_substep_end(self.args, self.state, self.control)
            log_arguments = (given["trial"], epoch, given["ignore_keys_for_eval"], given["start_time"])
            self._maybe_log_save_evaluate(self._tr_loss, None, model, *log_arguments)

    def _compute_loss_value(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
        return self.pipeline.loss(inputs)

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        return self.pipeline.clip_gradients(self.args.max_grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not output_dir or not isinstance(self.model, PeftModel):
            super().save_model(output_dir, _internal_call)
            return
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if parts := self.group.gather(trained_weights(self.model)):
            self.staging.stage(parts, partial(save_adapter, self.model, folder=Path(output_dir)))

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if isinstance(self.model, PeftModel):
            load_adapter(self.model, Path(checkpoint))
        else:
            super()._load_from_checkpoint(checkpoint, model)
