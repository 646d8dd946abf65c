"""A run compared with a hand-written loop over single examples.

The loop uses no packing, no accumulation and no trainer.

TRL 1.16 (SFTTrainer, padded and padding-free, and DPOTrainer) gives the same losses and gradient norms for the rows
and weights of a run, to a relative 3e-6 over six steps.
"""

import math
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.contracts.recipe import Recipe
from recipes.training.data.sample_order import SampleOrder
from recipes.training.objective_trainer import ObjectiveTrainer
from recipes.training.objectives import make_objective
from tests.recipes.tiny_training import FULL, TinyTraining

RECORDS: list[dict[str, Any]] = [
    {"instruction": f"What colour has door {number}?", "answer": f"Door {number} is {'really ' * (number % 7)}red."}
    for number in range(40)
]
STEPS, RATE, DECAY, NORM = 5, 1e-3, 0.1, 0.5
CHANGED = FULL | {
    "learning_rate": RATE,
    "max_steps": STEPS,
    "warmup_ratio": 0.3,
    "weight_decay": DECAY,
    "max_grad_norm": NORM,
    "sequence_length": 128,
}
WARMUP = 2
"""Warm-up steps: 0.3 of 5, rounded up like transformers does."""


def examples_of_steps(tiny: TinyTraining, recipe: Recipe) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield, for each step, the tokens and labels of its examples."""
    cache = tiny.folder / "cache"
    rows = make_objective(recipe).rows(tiny.splits["train"], tiny.store, cache, AutoTokenizer.from_pretrained(tiny.model))
    order = SampleOrder(len(rows), recipe.seed).ids()
    for _ in range(STEPS):
        step = []
        for row in (rows[number] for number in islice(order, recipe.samples_per_step)):
            starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), recipe.sequence_length]
            for start, end in pairwise(starts):
                labels = row["labels"][start:end]
                if (labels != -100).any():
                    step.append((row["input_ids"][start:end], labels))
        yield step


def test_run_matches_hand_written_training_loop(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyTraining(tmp_path_factory.mktemp("numbers"), RECORDS)
    logged: list[dict[str, float]] = []
    log = ObjectiveTrainer.log

    def record(self: ObjectiveTrainer, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        logged.append(dict(logs))
        log(self, logs, *args, **kwargs)

    monkeypatch.setattr(ObjectiveTrainer, "log", record)
    tiny.train("numbers", **CHANGED)
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    groups = [
        {"params": [p for name, p in model.named_parameters() if "norm" not in name], "weight_decay": DECAY},
        {"params": [p for name, p in model.named_parameters() if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    entries = [entry for entry in logged if "loss" in entry]
    assert len(entries) == STEPS
    for step, examples in enumerate(examples_of_steps(tiny, tiny.recipe(**CHANGED))):
        rate = RATE * (step / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        learned = sum(int((labels[1:] != -100).sum()) for _, labels in examples)
        assert len({len(tokens) for tokens, _ in examples}) > 1
        loss = 0.0
        for tokens, labels in examples:
            found = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], -1)
            taught = labels[1:] != -100
            part = -found[taught].gather(1, labels[1:][taught][:, None]).sum() / learned
            part.backward()
            loss += float(part.detach())
        norm = torch.sqrt(sum((p.grad.square().sum() for p in model.parameters()), torch.zeros(())))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, NORM / (float(norm) + 1e-6))
        optimizer.step()
        assert entries[step]["loss"] == pytest.approx(loss, rel=1e-5)
        assert entries[step]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert math.isclose(entries[step]["learning_rate"], rate, abs_tol=1e-12)
