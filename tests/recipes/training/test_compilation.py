"""Blocks that are compiled, here by the compiler's first half, which needs no GPU: a run goes on from them as it was, and
says where it is another.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import train as program
from recipes.results import TrainingFacts
from recipes.training.compilation import are_compiled, compile_blocks
from tests.recipes.tiny_training import LORA, TinyTraining


def with_first_half(model: Any, _: Path) -> None:
    torch.compiler.reset()
    for block in model.get_decoder().layers:
        block.compile(dynamic=False, backend="aot_eager")


def test_a_run_goes_on_with_compiled_blocks_and_says_where_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = TinyTraining(tmp_path)
    monkeypatch.setattr(program, "compile_blocks", with_first_half)
    whole = tiny.train("compiled", **LORA)
    tiny.lose_checkpoints("compiled", after=2)
    capsys.readouterr()
    again = tiny.train("compiled", **LORA)
    assert TrainingFacts.model_validate(again.facts).resumed_from == 2
    assert again.artifacts["adapter"].digest == whole.artifacts["adapter"].digest
    assert "other roundings" not in capsys.readouterr().out

    tiny.lose_checkpoints("compiled", after=2)
    monkeypatch.setattr(program, "compile_blocks", lambda model, cache: None)
    tiny.train("compiled", **LORA)
    assert "blocks were compiled for checkpoint 2, and are not here: the run goes on, with other roundings" in (
        capsys.readouterr().out
    )
    tiny.lose_checkpoints("compiled", after=4)
    monkeypatch.setattr(program, "compile_blocks", with_first_half)
    tiny.train("compiled", **LORA)
    assert "blocks were not compiled for checkpoint 4, and are here" in capsys.readouterr().out


def test_without_a_gpu_none_is_compiled(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    model: Any = torch.nn.Linear(2, 2)
    compile_blocks(model, tmp_path)
    assert not are_compiled(model)
    model.compile()
    assert are_compiled(model)
