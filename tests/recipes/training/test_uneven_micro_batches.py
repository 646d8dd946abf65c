"""A step with a smaller last micro-batch has the loss and update of all rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.training.data.examples import IGNORED_LABEL
from recipes.training.objective_trainer import ROW_COUNT_KEY, mask_empty_batch
from tests.recipes.training.training_workspace import Place, facts, pending_in

OF_PAIRS = ("train/reward_accuracy", "train/reward_margin")


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["sft", "dpo", "orpo"])
@pytest.mark.parametrize("rows", [5, pytest.param(7, marks=pytest.mark.long)])
def test_smaller_micro_batch_is_weighted_by_its_rows(place: Place, tmp_path: Path, objective: str, rows: int) -> None:
    settings: dict[str, Any] = {"objective": objective, "max_steps": 3, "eval_steps": None}
    whole = place.train(tmp_path / f"whole-{objective}-{rows}", batch_size=rows, **settings)
    micro_batches = {"batch_size": 4, "gradient_accumulation": 2, "rows_per_step": rows}
    parts = place.train(tmp_path / f"parts-{objective}-{rows}", **micro_batches, **settings)
    assert facts(parts).losses == pytest.approx(facts(whole).losses, rel=1e-4)
    assert facts(parts).tokens == facts(whole).tokens
    metrics = [logged(tmp_path / f"{name}-{objective}-{rows}") for name in ("whole", "parts")]
    assert {key for key, _ in metrics[0]} >= ({"train/grad_norm"} if objective == "sft" else {"train/grad_norm", *OF_PAIRS})
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-3, abs=1e-6)


def logged(work: Path) -> dict[tuple[str, int], float]:
    """Return the logged metrics of every step, except timings."""
    points = pending_in(work / "checkpoints" / "3")
    return {(point["key"], point["step"]): point["value"] for point in points if "second" not in point["key"]}


def test_placeholder_rows_are_masked_from_learning() -> None:
    labels = torch.tensor([[IGNORED_LABEL, 3, 4]])
    batch = {"input_ids": labels, "labels": labels, "shift_labels": labels[:, 1:]}
    assert mask_empty_batch(batch) is batch and mask_empty_batch({**batch, ROW_COUNT_KEY: 1})["labels"] is labels
    counted = mask_empty_batch({**batch, ROW_COUNT_KEY: 0})
    assert all((counted[name] == IGNORED_LABEL).all() for name in ("labels", "shift_labels"))
    assert counted["input_ids"] is labels
