"""Recipes that a base model or machine cannot run are refused before loading."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recipes import machine
from recipes import train as program
from recipes.contracts.job import BadConfiguration, Distributed
from recipes.training.parallel.process_group import join_process_group
from tests.recipes.training.training_workspace import Place


def test_sequence_longer_than_model_positions_is_refused_before_loading(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(program, "load_model")
    with pytest.raises(BadConfiguration, match=r"sequence_length is 513, and .* has 512 positions: lower it to 512 or less"):
        place.train(tmp_path / "long", sequence_length=513)


def test_gpu_without_cuda_build_of_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t NVIDIA A100-SXM4-80GB\n")
    begun: list[str] = []
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", begun.append)
    monkeypatch.setattr(dist, "all_reduce", lambda nothing: None)
    monkeypatch.setattr(dist, "get_node_local_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(machine, "NVIDIA_FOLDER", tmp_path / "none")
    join_process_group(Distributed(backend="nccl"))
    assert begun == ["gloo"]
    monkeypatch.setattr(machine, "NVIDIA_FOLDER", tmp_path)
    with pytest.raises(BadConfiguration, match=r"was built without CUDA: install .*torch==2[0-9.]+\), or set .* gloo"):
        join_process_group(Distributed(backend="nccl"))
    join_process_group(Distributed(backend="gloo"))
    assert begun == ["gloo", "gloo"]
