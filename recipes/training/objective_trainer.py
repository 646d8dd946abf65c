"""The trainer that takes rows and loss from an objective."""

from collections import defaultdict
from typing import Any

import torch

from recipes.training.model import autocast_dtype
from recipes.training.objectives.objective import Objective
from recipes.training.trainer import CheckpointingTrainer


class ObjectiveTrainer(CheckpointingTrainer):
    """What an objective tells of its micro-batches is logged as their mean, beside the loss that they belong to."""

    def __init__(self, *args: Any, objective: Objective, **kwargs: Any) -> None:
        super().__init__(*args, data_collator=objective.collate, **kwargs)
        self.objective = objective
        self.autocast_dtype = autocast_dtype(objective.recipe)
        self._told: dict[str, list[float]] = defaultdict(list)
        objective.begin(self.model)

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **kwargs: Any) -> Any:
        with torch.autocast(self.args.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            found = self.objective.loss(model, inputs)
            if found is None:
                return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        # The library divides by the accumulation itself only where a loss is not said to be a part of the step's mean.
        self.model_accepts_loss_kwargs = False
        for name, value in found.metrics.items():
            self._told[name if model.training else f"eval_{name}"].append(value)
        return (found.value, {"loss": found.value}) if return_outputs else found.value

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        evaluated = any(name.startswith("eval_") for name in logs)
        for name in sorted(name for name in self._told if name.startswith("eval_") == evaluated):
            values = [value for told in self.group.collect(self._told.pop(name)) for value in told]
            logs[name] = sum(values) / len(values)
        super().log(logs, *args, **kwargs)
