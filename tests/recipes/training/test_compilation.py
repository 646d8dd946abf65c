"""Compiled blocks: a run resumes unchanged, and logs a change of compilation.

Uses only the compiler's first stage, which needs no GPU.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes import train as program
from recipes.contracts.results import TrainingFacts
from recipes.training import compilation
from recipes.training.compilation import compile_blocks, has_compiled_blocks
from tests.recipes.tiny_training import LORA, TinyTraining


def with_first_half(model: Any, _: Path) -> None:
    torch.compiler.reset()
    for block in model.get_decoder().layers:
        block.compile(dynamic=False, backend="aot_eager")


@pytest.mark.slow
def test_compiled_run_resumes_and_logs_changed_compilation(
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
    assert "different rounding" not in capsys.readouterr().out

    tiny.lose_checkpoints("compiled", after=2)
    monkeypatch.setattr(program, "compile_blocks", lambda model, cache: None)
    tiny.train("compiled", **LORA)
    assert "blocks were compiled for checkpoint 2, and are not here: resuming with different rounding" in (
        capsys.readouterr().out
    )
    tiny.lose_checkpoints("compiled", after=4)
    monkeypatch.setattr(program, "compile_blocks", with_first_half)
    tiny.train("compiled", **LORA)
    assert "blocks were not compiled for checkpoint 4, and are here" in capsys.readouterr().out


def test_blocks_are_not_compiled_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    model: Any = torch.nn.Linear(2, 2)
    compile_blocks(model, tmp_path)
    assert not has_compiled_blocks(model)
    model.compile()
    assert has_compiled_blocks(model)


@pytest.mark.parametrize("lacks", [None, "compiler", "headers"])
def test_compiler_settings_are_reproducible_or_blocks_stay_uncompiled(
    tmp_path: Path, lacks: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulates a machine with a GPU.

    Settings that make programs differ between starts, or split them under DDP, are off.
    """
    if lacks != "headers":
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compilation, "has_triton", lambda: True)
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None if lacks == "compiler" else f"/usr/bin/{name}")
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda _: str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1))
    with dynamo.patch(optimize_ddp=True), inductor.patch(deterministic=False, compile_threads=2):
        limit = dynamo.recompile_limit
        compile_blocks(model, tmp_path)
        found = (dynamo.optimize_ddp, inductor.deterministic, inductor.compile_threads)
        dynamo.recompile_limit = limit
    assert has_compiled_blocks(model) is (lacks is None)
    if lacks:
        assert found == (True, False, 2) and "blocks are not compiled" in capsys.readouterr().out
    else:
        assert found == (False, True, 1)
        caches = [Path(os.environ[name]).parent for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
        assert caches == [tmp_path, tmp_path], "a pod can write nowhere else"
