"""Checkpoints that are written while training is steps ahead of them."""

import errno
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from recipes.checkpoint_folder import broken
from recipes.manifest import Manifest
from recipes.store import MANIFEST
from recipes.training import trainer
from recipes.training.staging import Staging
from tests.recipes.training.place import Place


def files_of(place: Place, work: Path) -> dict[int, dict[str, str]]:
    """SHA-256 of what each checkpoint holds of the model, by step."""
    found = {}
    for step in place.checkpoints(work).local_steps():
        folder = work / "checkpoints" / str(step)
        assert broken(folder, step) is None
        files = Manifest.model_validate_json((folder / MANIFEST).read_bytes()).files
        found[step] = {file.path: file.sha256 for file in files if Path(file.path).suffix in (".safetensors", ".pt", ".pth")}
    return found


class Held(Staging):
    """Writes a checkpoint when training is about to make the next, or is over."""

    def begin(self) -> Future[None]:
        self.may_write = threading.Event()
        self._actions.insert(0, self.may_write.wait)
        return super().begin()

    def settle(self) -> None:
        if self._written:
            assert not self._written.done()
            self.may_write.set()
        super().settle()

    def notice(self) -> None:
        """Nothing fails."""


@pytest.mark.parametrize("changed", [{}, {"method": "full", "dtype": "bfloat16"}], ids=str)
def test_a_checkpoint_is_that_of_its_step_however_late_it_is_written(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    at_once, late = (tmp_path / f"{name}-{len(changed)}" for name in ("at-once", "late"))
    policy = {"interval": "1h", "interval_steps": 3, "keep_last": 9}
    place.train(at_once, checkpoint=policy, eval_steps=8, **changed)
    monkeypatch.setattr(trainer, "Staging", Held)
    place.train(late, checkpoint=policy, eval_steps=8, **changed)
    found = files_of(place, late)
    assert [*found] == [8, 6, 3] and {"optimizer.pt", "scheduler.pt", "rng_state.pth"} < {*found[3]}
    assert found == files_of(place, at_once)


class Failed(Staging):
    """Has failed before the next step."""

    def begin(self) -> Future[None]:
        begun = super().begin()
        assert begun.exception()
        return begun


def test_what_cannot_be_written_ends_the_run_at_the_next_step_and_leaves_no_checkpoint(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next checkpoint may be an hour away."""

    def full(state: Any, file: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer, "Staging", Failed)
    monkeypatch.setattr(trainer, "save_without_checksum", full)
    policy = {"interval": "1h", "interval_steps": 3, "keep_last": 9}
    with pytest.raises(OSError, match="No space left"):
        place.train(tmp_path / "full", checkpoint=policy, eval_steps=8)
    said = capfd.readouterr().out
    assert "step 3/8" in said and "step 5/8" not in said
    assert not [*(tmp_path / "full" / "checkpoints").iterdir()]
