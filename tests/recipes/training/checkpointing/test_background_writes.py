"""Checkpoints written in the background while training continues."""

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import recipes.checkpoints.manager
from recipes.checkpoints.commit import find_corruption
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import PARTS_FOLDER
from recipes.runner import Restart
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.manifest import Manifest
from recipes.training import run_setup, trainer
from recipes.training.checkpointing import state_files
from recipes.training.checkpointing.safetensors_writer import write_safetensors
from recipes.training.checkpointing.staging import Staging
from recipes.training.parallel.process_group import ProcessGroup
from tests.recipes.training.forked_processes import Forks
from tests.recipes.training.parallel_strategies import shape
from tests.recipes.training.tracked_runs import install
from tests.recipes.training.training_workspace import Place

FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}


def files_of(place: Place, work: Path) -> dict[int, dict[str, str]]:
    """SHA-256 of each model file of each checkpoint, by step."""
    found = {}
    for step in place.checkpoints(work).local_steps():
        folder = work / "checkpoints" / str(step)
        assert find_corruption(folder, step) is None
        files = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes()).files
        found[step] = {file.path: file.sha256 for file in files if file.path.endswith((".safetensors", "scheduler.json"))}
    return found


class Held(Staging):
    """Delays each write until the next checkpoint is due or training ends."""

    def begin(self) -> Future[None]:
        self.may_write = threading.Event()
        self._actions.insert(0, self.may_write.wait)
        return super().begin()

    def settle(self) -> None:
        if self._written:
            assert not self._written.done()
            self.may_write.set()
        super().settle()

    def raise_if_failed(self) -> None:
        """Skip the check: no write fails here."""


@pytest.mark.parametrize("changed", [{}, {"method": "full", "dtype": "bfloat16"}], ids=str)
def test_late_background_write_contains_the_state_of_its_step(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    at_once, late = (tmp_path / f"{name}-{len(changed)}" for name in ("at-once", "late"))
    policy = {"interval": "1h", "interval_steps": 3, "keep_last": 9}
    place.train(at_once, checkpoint=policy, eval_steps=8, **changed)
    monkeypatch.setattr(trainer, "Staging", Held)
    place.train(late, checkpoint=policy, eval_steps=8, **changed)
    found = files_of(place, late)
    assert [*found] == [8, 6, 3] and {"optimizer.safetensors", "scheduler.json", "rng_state.safetensors"} < {*found[3]}
    assert found == files_of(place, at_once)


SHORT = """
import torch.distributed as dist
from recipes.training.objectives.sft import Sft
from recipes.training.checkpointing.staging import Staging

class Short(Sft):
    "The process of the rank that the recipe's description names finds no memory for copies."

    def begin(self, model):
        if self.recipe.description == str(dist.get_rank()):
            Staging._allocate_buffers = lambda staging, tensors: None
        super().begin(model)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed_zero2", marks=pytest.mark.long)])
def test_checkpoint_is_saved_when_one_process_lacks_memory_for_copies(
    place: Place, started: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Every process must save synchronously when one of them has to.

    Otherwise that process saves its part at once and the others save theirs at the end: a run deadlocked for two
    hours.
    """
    install("short", SHORT, tmp_path, monkeypatch)
    policy = {"interval": "1h", "interval_steps": 2, "keep_last": 9}
    settings = {**FULL, "batch_size": 2, "objective": "short", "max_steps": 4, "eval_steps": None, "checkpoint": policy}
    settings["distributed"] = shape(strategy, 2)
    found = []
    for short in ("nobody", "0", "1"):
        job = place.job(tmp_path / f"{strategy}-{short}", settings | {"description": short})
        started.train(job.model_copy(update={"distributed": place.recipe.changed(settings).distributed}))
        found.append(files_of(place, tmp_path / f"{strategy}-{short}"))
    assert [*found[0]] == [4, 2] and found[0][4] != found[0][2]
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize(
    ("settings", "processes"),
    [({"distributed": shape("fsdp", 1), **FULL}, 2), ({"distributed": shape("fsdp", 1)}, 1), ({"distributed": None}, 1)],
    ids=["all-save", "leader-saves", "alone"],
)
def test_memory_check_counts_the_saving_processes_of_the_machine(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    settings: dict[str, Any],
    processes: int,
) -> None:
    """Each of two processes on one machine sees the free memory that both share."""
    asked = []

    class Asked(Staging):
        def __init__(self, processes: int, **named: Any) -> None:
            asked.append(processes)
            super().__init__(processes, **named)

    monkeypatch.setattr(trainer, "Staging", Asked)
    monkeypatch.setattr(run_setup, "join_process_group", lambda _: ProcessGroup(local_size=2))
    place.train(tmp_path / request.node.callspec.id, max_steps=1, eval_steps=None, **settings)
    assert asked == [processes]


class Failed(Staging):
    """Fails the write before the next step."""

    def begin(self) -> Future[None]:
        begun = super().begin()
        assert begun.exception()
        return begun


def test_failed_write_ends_the_run_at_the_next_step_without_a_checkpoint(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The failure is not deferred to the next checkpoint, which may be an hour away."""

    def full(file: Path, *given: Any) -> None:
        if file.name == "optimizer.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_safetensors(file, *given)

    monkeypatch.setattr(trainer, "Staging", Failed)
    monkeypatch.setattr(state_files, "write_safetensors", full)
    policy = {"interval": "1h", "interval_steps": 3, "keep_last": 9}
    with pytest.raises(OSError, match="No space left"):
        place.train(tmp_path / "full", checkpoint=policy, eval_steps=8)
    said = capfd.readouterr().out
    assert "step 3/8" in said and "step 5/8" not in said
    assert not [*(tmp_path / "full" / "checkpoints").iterdir()]


def test_failed_commit_ends_the_run_at_the_next_step(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk fills up while the manifest is written, after all other files.

    This used to be noticed only at the next checkpoint.
    """

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = CheckpointManager.save

    @contextmanager
    def failed_before_the_next_step(self: CheckpointManager, *given: Any, **named: Any) -> Iterator[Path]:
        with write(self, *given, **named) as folder:
            yield folder
        assert self._pending_commit
        assert self._pending_commit.exception()

    monkeypatch.setattr(recipes.checkpoints.manager, "commit_checkpoint", full)
    monkeypatch.setattr(CheckpointManager, "save", failed_before_the_next_step)
    policy = {"interval": "1h", "interval_steps": 3, "keep_last": 9}
    with pytest.raises(OSError, match="No space left"):
        place.train(tmp_path / "not-whole", checkpoint=policy, eval_steps=8)
    said = capfd.readouterr().out
    assert "step 3/8" in said and "step 5/8" not in said
    assert not [*(tmp_path / "not-whole" / "checkpoints").iterdir()]


def test_part_upload_is_deferred_while_the_previous_one_is_running(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node defers newer parts while its upload is running.

    The process under test is the first of two nodes, and the other may upload faster. When each node uploaded
    the part that was newest at that time, the parts in the store did not match.
    """
    monkeypatch.setattr(ProcessGroup, "nodes", 2)
    put_files = Store.put_files

    def held(self: Store, folder: Path, uri: str, manifest: Manifest) -> None:
        end = time.monotonic() + 60
        while folder.name == "2" and not (folder.parent / "4").exists() and time.monotonic() < end:
            time.sleep(0.01)
        put_files(self, folder, uri, manifest)

    monkeypatch.setattr(Store, "put_files", held)
    work = tmp_path / "one-of-two"
    with pytest.raises(Restart, match="not all machines' parts of checkpoint 6 have arrived"):
        place.train(work, **FULL, distributed=shape("fsdp", 1), max_steps=6, eval_steps=None)
    sent = {uri.split("/")[-3] for uri in place.store.list(place.checkpoints(work).uri) if f"/{PARTS_FOLDER}/" in uri}
    assert sent == {"2", "6"}
