"""Every method through train, evaluate and convert, in this process, on a model that takes a second to make."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes import train as program
from recipes.schema import Result
from tests.recipes.tiny_training import FULL, LORA, TinyTraining


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    return TinyTraining(tmp_path_factory.mktemp("methods"))


@pytest.fixture(autouse=True)
def no_tracking_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody waits for a server that is not there; and what a program does on SIGTERM ends with it."""
    monkeypatch.setattr(program, "METRICS_GRACE_SECONDS", 0)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def losses(result: Result) -> list[float]:
    return list(result.facts["losses"].values())  # type: ignore[union-attr]


METHODS: dict[str, dict[str, Any]] = {"lora": LORA, "full": FULL}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_goes_through_the_whole_chain(tiny: TinyTraining, method: str) -> None:
    """Trained, resumed to the same bytes on another machine, evaluated, merged and exported."""
    recipe = METHODS[method]
    role = tiny.recipe(**recipe).trained_role
    trained = tiny.train(method, **recipe)
    assert losses(trained)[-1] < losses(trained)[0]
    assert trained.artifacts[role].kind == role
    assert tiny.store.manifest(trained.artifacts[role]).inputs == {
        "run": tiny.run.digest,
        "base": trained.artifacts["base"].digest,
        **{name: tiny.splits[name].digest for name in ("train", "validation")},
    }

    tiny.lose_checkpoints(method, after=2)
    resumed = tiny.train(method, **recipe)
    assert resumed.facts["resumed_from"] == 2
    assert losses(resumed) == losses(trained)
    assert resumed.artifacts == trained.artifacts

    report = tiny.evaluate(method, trained, **recipe).facts["report"]
    assert report["scores"]["tuned"]["loss"] < report["scores"]["base"]["loss"]  # type: ignore[call-overload, index]

    converted = tiny.convert(method, trained, **recipe)
    merged = converted.artifacts["merged"]
    assert tiny.store.manifest(merged).inputs == {
        role: trained.artifacts[role].digest,
        "base": trained.artifacts["base"].digest,
    }
    assert (tiny.fetch(converted.artifacts["gguf"]) / "model.gguf").stat().st_size > 100_000


def test_full_trains_every_tensor_and_stores_it_as_it_was_trained(tiny: TinyTraining) -> None:
    recipe = FULL | {"dtype": "bfloat16", "max_steps": 1, "seed": 7}
    trained = tiny.train("full-bfloat16", **recipe)
    folder = tiny.fetch(trained.artifacts["weights"])
    before, after = load_file(tiny.model / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name].float(), after[name].float())] == []
    merged = tiny.fetch(tiny.convert("full-bfloat16", trained, **recipe).artifacts["merged"])
    assert {tensor.dtype for tensor in load_file(merged / "model.safetensors").values()} == {torch.bfloat16}
    assert str(tiny.folder) not in (Path(folder) / "config.json").read_text()
    assert "transformers_version" not in json.loads((folder / "config.json").read_text())
