"""Throughput of a step, and what a run used over all its attempts.

Tokens per second are always reported, MFU only for a known peak.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from recipes import train as program
from recipes.contracts.job import Distributed, Hardware
from recipes.contracts.results import Usage, read_usage, write_usage
from recipes.runner import Preempted
from recipes.training.metrics.usage import (
    WRITE_INTERVAL_SECONDS,
    TokenCost,
    UsageMeter,
    UsageWriter,
    count_held_gpus,
    token_cost,
)
from recipes.training.objectives.dpo_orpo import Dpo
from tests.recipes.training.training_workspace import Place, facts, pending_in, stop_after


def test_mfu_is_reported_only_for_a_known_peak() -> None:
    assert TokenCost(4e9, 312e12).throughput_metrics(1000, 0.1) == {
        "train/tokens_per_second": 10_000.0,
        "train/mfu": 4e13 / 312e12,
    }
    assert TokenCost(4e9, None).throughput_metrics(1000, 0.5) == {"train/tokens_per_second": 2000.0}


def test_cpu_has_no_peak_flops(place: Place) -> None:
    work = token_cost(place.recipe, place.folder / "model")
    assert work.flops and work.peak is None


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_flops_are_those_of_the_installed_gpu(
    place: Place, monkeypatch: pytest.MonkeyPatch, device: str, peak: float | None
) -> None:
    """MFU must not use the peak of the requested GPU type.

    zen-7b-lora requests an A100: on an H200 its reported MFU was three times too high.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    asked = {"base_dtype": "bfloat16", "hardware": {"gpus": 1, "gpu_type": "nvidia-a100-40gb"}}
    assert token_cost(place.recipe.changed(asked), place.folder / "model").peak == peak


def test_preference_tokens_are_counted_without_padding(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger `sequence_length` must not raise the reported throughput of short pairs."""
    preferred = {"objective": "dpo", "max_steps": 4, "eval_steps": None}
    computed = []
    collate = Dpo.collate

    def counted(self: Dpo, rows: Any) -> Any:
        computed.append(sum(len(answer.tokens) for pair in rows for answer in (pair.chosen, pair.rejected)))
        return collate(self, rows)

    with monkeypatch.context() as patched:
        patched.setattr(Dpo, "collate", counted)
        assert facts(place.train(tmp_path / "pairs", **preferred, sequence_length=256)).tokens == sum(computed[:4])
    work = tmp_path / "stopped"
    with monkeypatch.context() as patched, pytest.raises(Preempted):
        patched.setattr(program.StopOnSignal, "on_step_end", stop_after(3))
        place.train(work, **preferred, sequence_length=512)
    assert facts(place.train(work, **preferred, sequence_length=512)).tokens == sum(computed[:4]) < 4 * 2 * 4 * 256
    points = pending_in(work / "checkpoints" / "4")
    assert {point["step"] for point in points if point["key"] == "train/tokens_per_second"} == {1, 2, 3, 4}


def written(place: Place, folder: str, steps: int) -> Usage:
    """Wait until that many steps are recorded: usage is written in the background."""
    end = time.monotonic() + 60
    while (found := read_usage(place.store, folder)).steps < steps:
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def test_run_without_usage_record_has_zero_usage(place: Place) -> None:
    found = read_usage(place.store, "s3://hanzo-ml/runs/none")
    assert not any(found.model_dump().values()) and (found.checkpoint_share, found.gpu_hours) == (0, 0)


def test_repeated_steps_count_twice_in_usage(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped run loses all its checkpoints, but not its recorded usage."""
    work, folder = tmp_path / "used", "s3://hanzo-ml/runs/used"
    with monkeypatch.context() as patched, pytest.raises(Preempted):
        patched.setattr(program.StopOnSignal, "on_step_end", stop_after(3))
        place.train(work)
    before = written(place, folder, 3)
    assert (before.tokens, before.num_checkpoints) == (3 * 4 * 64, 2)
    assert before.seconds > before.checkpoints > 0 and before.peak_memory > 0
    place.checkpoints(work).discard_from(1)
    used = {"seconds": 1000.0, "checkpoints": 500.0, "longest_checkpoint": 400.0, "peak_memory": 1 << 50}
    write_usage(place.store, folder, before.model_copy(update=used))
    found = facts(place.train(work))
    assert found.resumed_from is None
    assert found.train_seconds > 1000 and found.peak_memory == 1 << 50 and found.tokens == 8 * 4 * 64
    assert found.checkpoint_seconds > 500 and found.longest_checkpoint == 400
    assert found.checkpoint_share == pytest.approx(found.checkpoint_seconds / found.train_seconds, abs=1e-4)
    assert written(place, folder, 8).num_checkpoints > 4


def test_failed_run_records_its_usage(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within its first minute and without a checkpoint."""
    counted = []

    def fail(self: Dpo, model: Any, batch: Any) -> Any:
        counted.append(loss(self, model, batch))
        if len(counted) == 3:
            raise ValueError("my own fault")
        return counted[-1]

    loss = Dpo.loss
    monkeypatch.setattr(Dpo, "loss", fail)
    with pytest.raises(ValueError, match="my own fault"):
        place.train(tmp_path / "failing", objective="dpo", eval_steps=None, checkpoint={"interval_steps": 100})
    found = read_usage(place.store, "s3://hanzo-ml/runs/failing")
    assert found.steps == 2 and found.seconds > 0 and found.machine is not None and "torch" in found.machine.packages


def test_usage_is_written_once_a_minute_between_checkpoints(place: Place) -> None:
    now, folder = [0.0], "s3://hanzo-ml/runs/minutes"
    writing = UsageWriter(UsageMeter(Usage(), 0), place.store, folder, clock=lambda: now[0])

    def step(number: int, seconds: float) -> None:
        now[0] = seconds
        writing.on_step_end(TrainingArguments(report_to=[]), TrainerState(global_step=number), TrainerControl())

    for number, seconds in (
        (1, WRITE_INTERVAL_SECONDS),
        (2, WRITE_INTERVAL_SECONDS + 1),
        (3, 2 * WRITE_INTERVAL_SECONDS - 1),
    ):
        step(number, seconds)
    writing._writer.shutdown()
    assert read_usage(place.store, folder).steps == 1


def test_gpu_hours_follow_the_gpu_count_of_each_attempt(place: Place) -> None:
    """100 s on eight GPUs, then a while on three."""
    meter = UsageMeter(Usage(seconds=100.0, gpus=8, gpu_seconds=800.0), 3)
    used = meter.read(TrainerState(global_step=1))
    assert used.gpus == 3 and used.gpu_seconds - 800 == pytest.approx(3 * (used.seconds - 100))


def test_requested_but_absent_gpus_are_not_counted(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Distributed(num_nodes=2, gpus_per_node=4)
    job = place.job(tmp_path / "asked", {"max_steps": 1}).model_copy(update={"hardware": Hardware(cpu=1, gpus=4)})
    for there, held in ((2, 2), (8, 4), (0, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        assert count_held_gpus(job) == held
        assert count_held_gpus(job.model_copy(update={"distributed": shape})) == 2 * held
    assert facts(place.run(job, tmp_path / "asked")).gpu_seconds == 0


def test_gpu_seconds_include_model_loading(place: Place) -> None:
    meter = UsageMeter(Usage(seconds=100.0, gpus=2, gpu_seconds=200.0), 2, began=time.monotonic() - 60)
    used = meter.read(TrainerState(global_step=1))
    assert used.seconds - 100 < 60 and used.gpu_seconds - 200 == pytest.approx(2 * (60 + used.seconds - 100), abs=0.1)


def test_peak_memory_is_the_maximum_over_processes(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pipeline stage or one row may need more than the leader."""
    meter = UsageMeter(Usage(peak_memory=5), 1)
    meter.record_peaks([1 << 50, 7])
    meter.record_peaks([3])
    assert meter.read(TrainerState()).peak_memory == 1 << 50
    monkeypatch.setattr("recipes.training.trainer.peak_memory_bytes", lambda: 1 << 50)
    result = place.train(tmp_path, max_steps=1, eval_steps=None)
    assert facts(result).peak_memory == 1 << 50
