"""A third-party objective: its metrics are logged, and unusable results are refused by name."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

import recipes.contracts.recipe_references
import recipes.training.objectives as registry
from recipes.contracts.job import BadConfiguration
from recipes.training.objectives.objective import Loss
from recipes.training.objectives.sft import Sft
from tests.recipes.training.training_workspace import Place, pending_in

MADE: dict[str, Any] = {}
"""Class installed as the objective `own`."""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = EntryPoints([EntryPoint("own", f"{__name__}:WithMetrics", recipes.contracts.recipe_references.OBJECTIVES_GROUP)])
    for module in (recipes.contracts.recipe_references, registry):
        monkeypatch.setattr(module, "entry_points", lambda group: found.select(group=group))
    monkeypatch.setattr(EntryPoint, "load", lambda self: MADE["own"])
    yield
    MADE.clear()


class WithMetrics(Sft):
    """The model's own loss, a mean over micro-batches, plus two custom metrics."""

    made = 0

    def loss(self, model: Any, batch: Any) -> Any:
        value = model(**batch).loss
        self.made += 1
        return Loss(value, {"half": value.detach() / 2} | ({"every_other": 1.0} if self.made % 2 else {}))


def test_custom_objective_metrics_are_logged_under_their_names(place: Place, tmp_path: Path) -> None:
    """Only metrics of built-in objectives used to be logged; others were dropped silently."""
    MADE["own"] = WithMetrics
    place.train(tmp_path / "told", objective="own", max_steps=2, eval_steps=1, gradient_accumulation=2, batch_size=2)
    newest = place.checkpoints(tmp_path / "told").latest()
    assert newest is not None
    points = pending_in(newest[1])
    of = {(point["key"], point["step"]): point["value"] for point in points}
    for step in (1, 2):
        for name in ("train", "eval"):
            assert of[f"{name}/half", step] == pytest.approx(of[f"{name}/loss", step] / 2)
            assert of[f"{name}/every_other", step] == 1.0


class Bare(WithMetrics):
    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, batch).value


class Number(WithMetrics):
    def loss(self, model: Any, batch: Any) -> Any:
        return Loss(super().loss(model, batch).value.item())


class Several(WithMetrics):
    def loss(self, model: Any, batch: Any) -> Any:
        return Loss(super().loss(model, batch).value.repeat(3))


class Detached(WithMetrics):
    def loss(self, model: Any, batch: Any) -> Any:
        return Loss(super().loss(model, batch).value.detach())


class TakesLoss(WithMetrics):
    def loss(self, model: Any, batch: Any) -> Any:
        return Loss(super().loss(model, batch).value, {"loss": 1.0})


class TellsText(WithMetrics):
    def loss(self, model: Any, batch: Any) -> Any:
        metrics: Any = {"note": "hello"}
        return Loss(super().loss(model, batch).value, metrics)


class TellsSeveral(WithMetrics):
    def loss(self, model: Any, batch: Any) -> Any:
        return Loss(super().loss(model, batch).value, {"many": torch.ones(3)})


class WithoutRows(WithMetrics):
    def rows(self, *_: Any) -> Any:
        return []


class NoRows(WithMetrics):
    def rows(self, *_: Any) -> Any:
        return None


class Takes(WithMetrics):
    def __init__(self) -> None:
        """Take no recipe."""


class Foreign:
    def __init__(self, recipe: object) -> None:
        """Take the recipe, but provide no method of an Objective."""


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Bare, r"objective own: loss\(\) gave Tensor of shape \(\): return a Loss, or None"),
        (Number, "objective own: the value of its Loss is float: give a tensor with one number"),
        (Several, r"objective own: the value of its Loss is Tensor of shape \(3,\)"),
        (Detached, "objective own: its loss does not depend on what is trained"),
        (TakesLoss, "objective own: it returns a metric 'loss': name it with"),
        (TellsText, "objective own: its metric 'note' is str: return one number"),
        (TellsSeveral, r"objective own: its metric 'many' is Tensor of shape \(3,\): return one number"),
        (WithoutRows, r"the train split: objective own: rows\(\) gave none"),
        (NoRows, r"the train split: objective own: rows\(\) gave NoneType"),
        (Takes, "objective own: .*:WithMetrics cannot be made: TypeError: .*takes 1 positional argument"),
        (Foreign, "objective own: .*:WithMetrics is no Objective"),
    ],
)
def test_unusable_custom_objective_result_is_refused_by_name(place: Place, tmp_path: Path, made: Any, said: str) -> None:
    """Such results used to be trained on.

    Gradients of a bare tensor were not divided by the accumulation steps; an objective without rows never ended.
    """
    MADE["own"] = made
    with pytest.raises(BadConfiguration, match=said):
        place.train(tmp_path / made.__name__, objective="own", max_steps=1, eval_steps=None)
