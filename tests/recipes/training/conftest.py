"""Fixtures for training tests: a tiny model, recorded samples, and a poisoned sample."""

import math
import signal
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from recipes import train as program
from recipes.training.data.sample_order import SampleOrder
from recipes.training.objectives import sft
from tests.recipes.training.forked_processes import Forks, forks
from tests.recipes.training.tracked_runs import Runs
from tests.recipes.training.training_workspace import Place
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture(scope="module")
def runs(place: Place, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(place, server, tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def started(place: Place) -> Iterator[Forks]:
    with forks(place) as running:
        yield running


@pytest.fixture(autouse=True)
def signals_stay() -> Iterator[None]:
    """Restore the SIGTERM handler, which training replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Recorded:
    """Rows of a split that record the requested indices."""

    def __init__(self, rows: Any, ids: list[int]) -> None:
        self.rows = rows
        self.ids = ids

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.ids.append(index)
        return self.rows[index]


@pytest.fixture
def consumed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the indices of training rows requested by each call of the program."""
    calls: list[list[int]] = []
    packed = sft.load_packed_rows

    def recorded(split: Any, *given: Any) -> Any:
        rows = packed(split, *given)
        if not split.uri.endswith("/train"):
            return rows
        calls.append([])
        return Recorded(rows, calls[-1])

    monkeypatch.setattr(sft, "load_packed_rows", recorded)
    return calls


@pytest.fixture
def poisoned(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ids of all samples in run order; one of step 5 gives NaN."""
    ids = list(islice(SampleOrder(60, place.recipe.seed).ids(), 60))
    load, packed = program.load_model, sft.load_packed_rows
    bad: list[torch.Tensor] = []

    def remembered(split: Any, *given: Any) -> Any:
        rows = packed(split, *given)
        if split.uri.endswith("/train"):
            bad.append(rows[ids[17]]["input_ids"])
        return rows

    def spoil(module: torch.nn.Module, given: Any, named: dict[str, Any], output: Any) -> Any:
        if module.training and any(torch.equal(row, bad[-1]) for row in named["input_ids"]):
            output.loss = output.loss * math.nan
        return output

    def spoiled(*given: Any) -> Any:
        model = load(*given)
        model.register_forward_hook(spoil, with_kwargs=True)
        return model

    monkeypatch.setattr(sft, "load_packed_rows", remembered)
    monkeypatch.setattr(program, "load_model", spoiled)
    return ids
