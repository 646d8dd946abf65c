"""Recovery of runs from out of memory and divergence.

Consumed samples are compared by their ids.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from inspect import currentframe
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from functorch.compile import nop
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError
from transformers import PreTrainedModel

from recipes import train as program
from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts import job as schema
from recipes.contracts.job import OUT_OF_MEMORY_FILE, BadConfiguration, Tracking
from recipes.contracts.recovery_log import (
    Diverged,
    NotCompiled,
    NotDeterministic,
    OutOfMemory,
    RecoveryLog,
    add_recovery_event,
    read_recovery_log,
)
from recipes.platform_errors import is_out_of_memory
from recipes.runner import Restart
from recipes.training.compilation import compile_failure_reason
from recipes.training.determinism import allow_nondeterminism, enable_determinism, nondeterministic_operation
from recipes.training.metrics.tracking import TrackingCallback
from recipes.training.parallel.process_group import ProcessGroup
from recipes.training.recovery import recover_from_error
from tests.recipes.training.training_workspace import CHECKPOINTS, Place, facts, pending_in
from tests.support.server_process import ServerProcess

GIB = 1 << 30
REFUSED = "does not have a deterministic implementation"


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From step 5 on, more than two training rows exceed the memory limit.

    A row takes 3 GiB of 8.5 GiB.
    """
    load = program.load_model
    steps = 0

    def costly(*given: Any) -> Any:
        model = load(*given)

        def allocate(module: torch.nn.Module, arguments: Any, named: dict[str, Any]) -> None:
            nonlocal steps
            if not module.training:
                return
            steps += 1
            if steps > 4:
                torch.empty(len(named["input_ids"]), 3 * GIB, dtype=torch.uint8)

        model.register_forward_pre_hook(allocate, with_kwargs=True)
        return model

    monkeypatch.setattr(program, "load_model", costly)
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 17 * GIB // 2, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("NCCL error: ncclUnhandledCudaError: Call to CUDA failed.\nCuda failure 'out of memory'"), True),
        (RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed.\nFailed to CUDA calloc async 608 bytes"), True),
        (RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 1 'invalid argument'"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
    ],
)
def test_out_of_memory_errors_of_each_library_are_recognized(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.requirement("Y6")
@pytest.mark.slow
def test_out_of_memory_step_is_repeated_in_smaller_micro_batches_on_same_samples(
    place: Place, tmp_path: Path, consumed: list[list[int]], request: pytest.FixtureRequest
) -> None:
    expected = facts(place.train(tmp_path / "enough"))
    assert 0 < expected.checkpoint_share < 1 and expected.longest_checkpoint <= expected.checkpoint_seconds
    assert expected.tokens == 8 * 4 * 64
    request.getfixturevalue("limited")
    work = tmp_path / "short"
    with pytest.raises(
        Restart, match="step 5 did not fit into memory: continuing with batch_size 2 and gradient_accumulation 2"
    ):
        place.train(work)
    assert place.checkpoints(work).local_steps() == [4, 2]
    found = facts(place.train(work))
    assert found.resumed_from == 4
    assert found.incidents == (OutOfMemory(step=5, batch_size=2, gradient_accumulation=2, after=4),)
    assert consumed[1][:16] + consumed[2] == consumed[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.slow
def test_out_of_memory_with_batch_size_one_is_refused_with_advice(place: Place, tmp_path: Path, limited: None) -> None:
    odd = {"batch_size": 3, "gradient_accumulation": 1, "max_steps": 5}
    with pytest.raises(Restart, match="batch_size 1 and gradient_accumulation 3"):
        place.train(tmp_path / "odd", **odd)
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[0] - 7 * GIB, -1))
    with pytest.raises(BadConfiguration, match="batch_size 1, and there is no smaller one: give a shorter sequence_length"):
        place.train(tmp_path / "odd", **odd)


@pytest.mark.requirement("Y6")
@pytest.mark.slow
def test_run_killed_by_oom_killer_resumes_with_smaller_micro_batches(place: Place, tmp_path: Path) -> None:
    work = tmp_path / "ended"
    place.train(work, max_steps=2)
    for batch, accumulation in ((2, 2), (1, 4), (1, 4)):
        (work / OUT_OF_MEMORY_FILE).touch()
        found = facts(place.train(work))
        incident = found.incidents[-1]
        done = 2 if batch == 2 else 8
        assert incident == OutOfMemory(step=None, batch_size=batch, gradient_accumulation=accumulation, after=done)
        assert not (work / OUT_OF_MEMORY_FILE).exists()
    assert len(found.incidents) == 2 and len(found.losses) == 8


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 3 on, an operation has no deterministic kernel, although determinism is required."""
    load = program.load_model
    strict = [True]
    monkeypatch.setattr(program, "allow_nondeterminism", lambda: strict.remove(True))

    def strictly(*given: Any) -> Any:
        steps = 0
        model = load(*given)

        def check(module: torch.nn.Module, arguments: Any) -> None:
            nonlocal steps
            steps += module.training
            if strict and steps > 2:
                raise RuntimeError(f"index_fold_cuda_ {REFUSED}, but you set 'torch.use_deterministic_algorithms(True)'")

        model.register_forward_pre_hook(check)
        return model

    monkeypatch.setattr(program, "load_model", strictly)


def test_nondeterministic_operation_is_recorded_and_run_continues_with_it(
    place: Place, tmp_path: Path, refused: None, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "refused"
    with pytest.raises(Restart, match="step 3 used index_fold_cuda_, which has no deterministic kernel"):
        place.train(work, max_steps=4)
    capsys.readouterr()
    found = facts(place.train(work, max_steps=4))
    assert found.resumed_from == 2 and len(found.losses) == 4
    assert found.incidents == (NotDeterministic(step=3, operation="index_fold_cuda_"),)
    assert found.incidents[0].message in capsys.readouterr().out


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU compiler that fails in the backward pass of the first block."""

    def fail(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise InductorError(RuntimeError("PassManager::run failed"), currentframe())

    def compile_blocks(model: PreTrainedModel, cache: Path) -> None:
        backend = aot_autograd(fw_compiler=nop, bw_compiler=fail)
        model.get_decoder().layers[0].compile(dynamic=False, backend=backend)

    monkeypatch.setattr(program, "compile_blocks", compile_blocks)


@pytest.mark.slow
def test_run_continues_uncompiled_after_a_compiler_failure(
    place: Place, tmp_path: Path, not_compiled: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Observed with Triton 3.6, in float16 with dropout and gradient checkpointing."""
    work = tmp_path / "uncompiled"
    with pytest.raises(Restart, match=r"step 1 used a block that cannot be compiled on this machine \(RuntimeError: PassM"):
        place.train(work, max_steps=2)
    capsys.readouterr()
    found = facts(place.train(work, max_steps=2))
    assert [*map(type, found.incidents)] == [NotCompiled] and len(found.losses) == 2
    assert found.incidents[0].message in capsys.readouterr().out


def test_out_of_memory_inside_the_compiler_counts_as_out_of_memory(place: Place, tmp_path: Path) -> None:
    error = InductorError(RuntimeError("CUDA out of memory"), currentframe())
    uri = CHECKPOINTS.format(tmp_path.name)
    assert "did not fit into memory" in str(recover_from_error(error, RecoveryLog(), place.store, uri, place.recipe, 1))
    other = BackendCompilerFailed(nop, RuntimeError("PassManager::run failed\nat 41:24"), currentframe())
    assert compile_failure_reason(other) == "RuntimeError: PassManager::run failed"
    assert compile_failure_reason(RuntimeError("PassManager::run failed")) is None, "a step may fail for other reasons"
    known = RecoveryLog(entries=(NotCompiled(step=1, reason="r"),))
    assert recover_from_error(other, known, place.store, uri, place.recipe, 2) is None, "nothing is compiled any more"


def test_deterministic_algorithms_are_enforced_on_gpu_until_nondeterminism_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `warn_only`, the backward pass of attention is not deterministic."""
    calls: list[tuple[bool, bool]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda mode, *, warn_only=False: calls.append((mode, warn_only))
    )
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":8:8")
    enable_determinism()
    assert calls == [(True, False)] and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    allow_nondeterminism()
    assert calls[1:] == [(True, True)]
    assert nondeterministic_operation(RuntimeError(f"cumsum_cuda_kernel {REFUSED}, but you set")) == "cumsum_cuda_kernel"
    assert nondeterministic_operation(RuntimeError("CUDA error: an illegal memory access was encountered")) is None


@pytest.mark.slow
def test_diverged_run_skips_bad_samples_and_resumes_bit_for_bit(
    place: Place, tmp_path: Path, poisoned: list[int], consumed: list[list[int]]
) -> None:
    work = tmp_path / "skip"
    policy = {"divergence": {"action": "skip"}}
    with pytest.raises(Restart, match="the loss of step 5 is nan; continuing from checkpoint 2 without samples 12 to 19"):
        place.train(work, **policy)
    result = place.train(work, **policy)
    found = facts(result)
    assert found.resumed_from == 2
    assert len(found.incidents) == 1
    assert None not in found.losses.values() and len(found.losses) == 8
    assert [row for row in consumed[1] if row != poisoned[17]] == poisoned[8:12] + poisoned[20:40]

    place.checkpoints(work).discard_from(5)
    again = place.train(work, **policy)
    assert facts(again).resumed_from == 4
    assert facts(again).losses == found.losses
    assert again.artifacts["adapter"].digest == result.artifacts["adapter"].digest
    pending = pending_in(work / "checkpoints" / "8")
    assert {point["step"] for point in pending if point["key"] == "train/loss"} == set(range(1, 9))


@pytest.mark.slow
def test_metrics_of_repeated_steps_are_logged_once_despite_kills(
    place: Place, tmp_path: Path, poisoned: list[int], server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history keeps the bad steps, followed by each step of the resumed run."""
    made = httpx.post(f"{server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"})
    run_id = made.json()["run"]["info"]["run_id"]
    work = tmp_path / "twice"
    job = place.job(work, {"divergence": {"action": "skip"}, "eval_steps": None}).model_copy(
        update={"tracking": Tracking(uri=server.url, run_id=run_id)}
    )

    def train() -> Any:
        work.mkdir(exist_ok=True)
        return program.train(job, place.store, work)

    with pytest.raises(Restart, match="the loss of step 5 is nan"):
        train()
    with monkeypatch.context() as dying:
        log = TrackingCallback.on_log

        def die(self: Any, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            log(self, args, state, control, logs, **named)
            if state.global_step == 5:
                raise ConnectionAbortedError("as if it were killed")

        dying.setattr(TrackingCallback, "on_log", die)
        for _ in "12":
            with pytest.raises(ConnectionAbortedError):
                train()
    assert facts(train()).resumed_from == 4
    for key in ("train/loss", "train/tokens_per_second"):
        query = {"run_id": run_id, "metric_key": key}
        history = httpx.get(f"{server.url}/api/2.0/mlflow/metrics/get-history", params=query).json()["metrics"]
        assert [point["step"] for point in history] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8], key


@pytest.mark.slow
def test_machine_absent_during_a_divergence_does_not_restore_discarded_checkpoint(
    place: Place, tmp_path: Path, poisoned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is first in the next start, and its checkpoint is newer than the store's."""
    work, policy, heal = tmp_path / "away", {"divergence": {"action": "skip"}}, program.roll_back
    away = tmp_path / "machine-that-was-away"

    def roll_back(*given: Any) -> Any:
        shutil.copytree(work / "checkpoints" / "4", away)
        return heal(*given)

    monkeypatch.setattr(program, "roll_back", roll_back)
    with pytest.raises(Restart, match="continuing from checkpoint 2 without samples 12 to 19"):
        place.train(work, **policy)
    shutil.copytree(away, work / "checkpoints" / "4")
    found = facts(place.train(work, **policy))
    assert (found.resumed_from, len(found.losses), len(found.incidents)) == (2, 8, 1)


def test_non_leader_machine_discards_diverged_checkpoints(
    place: Place, tmp_path: Path, poisoned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lead the next start. The leader deletes the checkpoints in the store."""
    run = program.run_training

    def run_as_follower(*given: Any) -> None:
        run(*given)
        monkeypatch.setattr(ProcessGroup, "is_leader", False)

    monkeypatch.setattr(program, "run_training", run_as_follower)
    work = tmp_path / "beside"
    place.run(place.job(work, {}), work)
    assert place.checkpoints(work).local_steps() == [2]
    assert place.checkpoints(work).stored_steps() == [4, 2]


@pytest.mark.requirement("I6")
def test_run_saves_more_often_after_a_divergence(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval is 1000 steps, 500 for an unstable run; here it is one."""
    monkeypatch.setattr(schema, "UNSTABLE_INTERVAL_STEPS", 1)
    for name, skipped, saved in (("was-ended", None, [3, 2]), ("unstable", (0, 4), [3, 2, 1])):
        bad = Diverged(step=2, noticed=2, reason="it was", rolled_back_to=None, skipped=skipped)
        add_recovery_event(place.store, CHECKPOINTS.format(name), bad)
        place.train(tmp_path / name, max_steps=3, eval_steps=None)
        assert place.checkpoints(tmp_path / name).local_steps() == saved


@pytest.mark.requirement("Y7")
def test_a_diverged_run_stops_with_the_weights_of_its_last_good_checkpoint(
    place: Place, tmp_path: Path, poisoned: list[int]
) -> None:
    work = tmp_path / "stop"
    result = place.train(work)
    found = facts(result)
    assert found.published_step == 2
    assert isinstance(found.incidents[0], Diverged) and found.incidents[0].skipped is None
    assert read_recovery_log(place.store, CHECKPOINTS.format("stop")).entries == found.incidents
    checkpoint = work / "checkpoints" / "2" / "adapter_model.safetensors"
    assert (work / "adapter" / "adapter_model.safetensors").read_bytes() == checkpoint.read_bytes()
    # killed before it could report: it ends the same, and the incident counts once
    again = place.train(work)
    assert again.artifacts == result.artifacts
    assert facts(again).incidents == found.incidents


@pytest.fixture
def climbing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply each loss by a hundred from step 25 on."""
    load = program.load_model
    steps = 0

    def climb(module: torch.nn.Module, given: Any, named: dict[str, Any], output: Any) -> Any:
        nonlocal steps
        steps += module.training
        if steps >= 25:
            output.loss = output.loss * 100
        return output

    def climbed(*given: Any) -> Any:
        model = load(*given)
        model.register_forward_hook(climb, with_kwargs=True)
        return model

    monkeypatch.setattr(program, "load_model", climbed)


def test_last_good_checkpoint_is_kept_while_divergence_is_suspected(place: Place, tmp_path: Path, climbing: None) -> None:
    """More checkpoints are saved while divergence is suspected than are kept.

    All of those were bad, and the run had none to roll back to.
    """
    work, policy = tmp_path / "climbing", {"divergence": {"patience": 9}, "max_steps": 40, "eval_steps": None}
    (incident,) = facts(place.train(work, **policy)).incidents
    assert isinstance(incident, Diverged)
    assert (incident.step, incident.noticed, incident.rolled_back_to) == (25, 33, 22)
    assert place.checkpoints(work).local_steps() == place.checkpoints(work).stored_steps() == [22]


def test_divergence_before_the_first_checkpoint_still_publishes_a_result(place: Place, tmp_path: Path) -> None:
    """The learning rate is absurd.

    The result is needed to register the version, and to quarantine it with the reason.
    """
    result = place.train(tmp_path / "absurd", learning_rate=1e30, eval_steps=None)
    found = facts(result)
    assert isinstance(found.incidents[0], Diverged) and found.incidents[0].rolled_back_to is None
    assert None in found.losses.values()
    assert set(result.artifacts) == {"adapter", "base"}
    assert place.checkpoints(tmp_path / "absurd").stored_steps() == []


def test_best_weights_are_published_with_publish_best(place: Place, tmp_path: Path) -> None:
    """The learning rate changes no float32 weight; of equal losses the first is best."""
    result = place.train(tmp_path / "best", publish="best", learning_rate=1e-15)
    found = facts(result)
    assert found.published_step == found.best_step != 8
    best = tmp_path / "best" / "checkpoints" / str(found.best_step) / "adapter_model.safetensors"
    assert (tmp_path / "best" / "adapter" / "adapter_model.safetensors").read_bytes() == best.read_bytes()


def test_publishing_frees_disk_space_but_keeps_the_published_checkpoint(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk full of checkpoints, a run of many hours failed while publishing."""
    work, made = tmp_path / "best", CheckpointManager.free_disk_space
    seen: list[tuple[int | None, bool]] = []

    def noting(self: CheckpointManager, kept_step: int | None = None) -> None:
        seen.append((kept_step, (work / "adapter").exists()))
        made(self, kept_step)

    monkeypatch.setattr(CheckpointManager, "free_disk_space", noting)
    found = facts(place.train(work, publish="best", learning_rate=1e-15))
    assert seen[-1] == (found.best_step, False)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_empty_validation_split_is_refused(
    place: Place, tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "records.jsonl").touch()
    empty = place.store.publish(tmp_path / "empty", f"s3://hanzo-ml/datasets/d/1/{objective}-empty", "validation")
    monkeypatch.setitem(place.inputs if objective == "sft" else place.pairs, "validation", empty)
    with pytest.raises(BadConfiguration, match="the validation split: it has no records: give the dataset more of them"):
        place.train(tmp_path / "empty-run", objective=objective)


def test_changed_effective_batch_is_refused_on_resume(place: Place, tmp_path: Path) -> None:
    place.train(tmp_path / "other", max_steps=2)
    with pytest.raises(
        BadConfiguration, match="checkpoint 2 has seen 8 of the samples, and with this recipe it would have seen 16"
    ):
        place.train(tmp_path / "other", gradient_accumulation=2)
