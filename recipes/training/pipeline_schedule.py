"""How a step's micro-batches go through the stages of a model, forwards and back (`recipes.planning.parallel_layout`).

Stages are in the middle of others' micro-batches until a step ends, so that none leaves it before. One that is asked to stop
computes nothing from there on and sends what has the right shape: what is left of a step of minutes takes a moment, and all
of them throw the step away.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from recipes.contracts.recipe import Recipe
from recipes.planning.parallel_layout import runs_1f1b
from recipes.training.data.examples import IGNORED
from recipes.training.loss_scaling import scaled
from recipes.training.packing import learned
from recipes.training.parallel.pipeline_stage import causal_of
from recipes.training.parallel.process_group import Group


class BrokenOff(Exception):
    """A stage was asked to stop in the middle of a step, whose gradients are those of no step."""


class StageModule(nn.Module):
    """Tokens in the first stage, and what the stage before has made of them in the others -> hidden states.

    `skipped` says whether something in this step was not computed. An evaluation is: its numbers count.
    """

    def __init__(
        self, model: Any, *, first: bool, autocast: torch.dtype | None, is_asked_to_stop: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.model = model
        self.first = first
        self.autocast_dtype = autocast
        self.is_asked_to_stop = is_asked_to_stop
        self.skipped = False

    def skips(self) -> bool:
        self.skipped |= torch.is_grad_enabled() and self.is_asked_to_stop()
        return self.skipped

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def forward(self, given: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.skips():
            if not self.first:
                return given * 1  # the stage before waits for its gradient
            shape = (*given.shape, causal_of(self.model).config.hidden_size)
            return torch.zeros(shape, dtype=self.model.dtype, device=given.device, requires_grad=True)
        named = {"input_ids" if self.first else "inputs_embeds": given}
        with self.autocast(given.device):
            found = causal_of(self.model).model(**named, position_ids=position_ids, use_cache=False)
        hidden: torch.Tensor = found.last_hidden_state
        return hidden

    def loss(
        self, hidden: torch.Tensor, places: torch.Tensor, following: torch.Tensor, items: torch.Tensor | None
    ) -> torch.Tensor:
        """The model's own, of the last stage: the mean over `items` tokens, or over those that are learned here, which are
        `following` the `places`.
        """
        if self.skips():
            return hidden.float().sum() * 0
        causal = causal_of(self.model)
        with self.autocast(hidden.device):
            logits = causal.lm_head(hidden[:, places])
            found: torch.Tensor = causal.loss_function(
                logits=logits,
                labels=None,
                vocab_size=causal.config.vocab_size,
                shift_labels=following,
                num_items_in_batch=items,
            )
        return found


class Pipeline:
    """The stage of this process, and the others as it sees them. Every method is called by all of them at once."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        group: Group,
        device: torch.device,
        autocast: torch.dtype | None,
        scale: float,
        is_asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.group, self.rank, self.stages, self.device = group, group.rank, group.size, device
        self.last = group.size - 1
        first = group.rank == 0
        self.module = StageModule(model, first=first, autocast=autocast, is_asked_to_stop=is_asked_to_stop)
        self.scale = scale
        config = causal_of(model).config
        self.hidden_size, self.dtype = config.hidden_size, model.dtype
        # A head that is the embedding is trained in two places: their gradients are one sum.
        is_tied = config.tie_word_embeddings and recipe.method == "full"
        self._ends = dist.new_group([0, self.last]) if is_tied else None
        self._rows = recipe.batch_size
        self._schedule = self._make_schedule(recipe)
        self._items: torch.Tensor | None = None
        self._learned: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())

    def _make_schedule(self, recipe: Recipe) -> Schedule1F1B | ScheduleGPipe:
        """Shapes are stated: else the first step of every process would compute a micro-batch more to find them."""
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
        return scaled(self.module.loss(hidden, *next(self._learned), self._items), self.scale)

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """All micro-batches of a step, whose gradients are there then. Returns its loss, in every process.

        Raises:
            BrokenOff: in every process; one of them was asked to stop, and did not compute all of them.
        """
        labels = batch["labels"]
        self.module.skipped = False
        self._items = (labels[:, 1:] != IGNORED).sum()
        given = (batch["input_ids"],) if self.rank == 0 else ()
        target = labels if self.rank == self.last else None
        if self.rank == self.last:  # before the first of them: a GPU counts them, and would be waited for in their midst
            self._learned = iter([learned(part) for part in torch.split(labels, self._rows)])
        losses: list[torch.Tensor] = []
        # Off by itself, but around all micro-batches: else each of them holds copies of its own of the weights in 16 bits.
        with torch.autocast(self.device.type, enabled=False):
            try:
                self._schedule.step(
                    *given, position_ids=batch["position_ids"], target=target, losses=losses, return_outputs=False
                )
            except RuntimeError as error:  # in the schedule's words, which do not say that memory ran out
                if error.__cause__ is None:
                    raise
                raise error.__cause__ from None
        if self.group.any(self.module.skipped):
            raise BrokenOff
        self._add_up_tied()
        return self._of_last(torch.stack([loss.detach() for loss in losses]).sum() if losses else None)

    @torch.no_grad()
    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean over the tokens that are learned in a batch of any number of rows; nothing is kept of it."""
        tokens = batch["input_ids"]
        given = tokens
        if self.rank > 0:
            given = torch.empty(*tokens.shape, self.hidden_size, dtype=self.dtype, device=self.device)
            dist.recv(given, self.rank - 1)
        hidden = self.module(given, batch["position_ids"])
        if self.rank < self.last:
            dist.send(hidden.contiguous(), self.rank + 1)
            return self._of_last(None)
        return self._of_last(self.module.loss(hidden, *learned(batch["labels"]), None))

    def clip(self, largest: float) -> torch.Tensor:
        """Bring the gradients of all stages down to that norm, if they are larger. Returns the norm before."""
        trained = [weight for weight in self.module.parameters() if weight.grad is not None]
        counted = [weight for weight in trained if weight is not self._copy_of_embedding()]
        norm = get_total_norm([weight.grad for weight in counted if weight.grad is not None])
        squares = norm.to(self.device, torch.float32) ** 2
        dist.all_reduce(squares)
        total = squares.sqrt()
        clip_grads_with_norm_(trained, largest, total)
        return total

    def _of_last(self, value: torch.Tensor | None) -> torch.Tensor:
        told = torch.zeros((), device=self.device) if value is None else value.to(self.device, torch.float32).clone()
        dist.broadcast(told, self.last)
        return told

    def _add_up_tied(self) -> None:
        if self._ends is not None and self.rank in (0, self.last):
            embedding = causal_of(self.module.model).model.embed_tokens.weight
            dist.all_reduce(embedding.grad, group=self._ends)

    def _copy_of_embedding(self) -> torch.Tensor | None:
        """Of the last stage, where the first trains the same: it counts once."""
        if self._ends is None or self.rank != self.last:
            return None
        weight: torch.Tensor = causal_of(self.module.model).model.embed_tokens.weight
        return weight
