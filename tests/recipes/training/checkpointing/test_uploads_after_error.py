"""Uploads of a run that ends with an error.

Its newest checkpoint is in the store before it exits, and it reports the original error.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import set_seed

from recipes import train as program
from recipes.checkpoints import upload
from recipes.checkpoints.node_parts import PART_KEY, CheckpointPart
from recipes.checkpoints.remote import RemoteCheckpoints
from recipes.contracts.recovery_log import RecoveryLog, read_recovery_log
from recipes.runner import Restart
from recipes.storage.buckets import StoreFull
from recipes.training.determinism import wrap_seed
from recipes.training.parallel.process_group import ProcessGroup
from recipes.training.run_setup import RunState
from tests.recipes.training.training_workspace import CHECKPOINTS, Place

FAULT = "mat1 and mat2 shapes cannot be multiplied"
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> threading.Event:
    """Raise the parametrized error in step 3; return an event that is set by then."""
    load, raised, steps = program.load_model, threading.Event(), 0

    def fail(module: Any, arguments: Any) -> None:
        nonlocal steps
        steps += module.training
        if steps > 2:
            raised.set()
            raise RuntimeError(request.param)

    def failing_model(*given: Any) -> Any:
        model = load(*given)
        model.register_forward_pre_hook(fail)
        return model

    monkeypatch.setattr(program, "load_model", failing_model)
    return raised


@pytest.mark.parametrize(
    ("failing", "expected"), [(FAULT, RuntimeError), (NO_MEMORY, Restart)], indirect=["failing"], ids=["fault", "memory"]
)
def test_pending_upload_finishes_before_failed_program_exits(
    place: Place, tmp_path: Path, failing: threading.Event, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process used to exit with the error and abort the upload."""
    send = RemoteCheckpoints.send

    def slow(*given: Any) -> Any:
        assert failing.wait(60)
        time.sleep(0.5)
        return send(*given)

    monkeypatch.setattr(RemoteCheckpoints, "send", slow)
    work = tmp_path / f"arrives-{expected.__name__}"
    with pytest.raises(expected, match=r"multiplied|did not fit"):
        place.train(work, eval_steps=None)
    assert place.checkpoints(work).stored_steps() == [2]


@pytest.mark.parametrize(
    ("failing", "expected"), [(FAULT, RuntimeError), (NO_MEMORY, Restart)], indirect=["failing"], ids=["fault", "memory"]
)
def test_failed_upload_does_not_mask_the_original_error(
    place: Place,
    tmp_path: Path,
    failing: threading.Event,
    expected: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A full bucket masked an out-of-memory error.

    The run failed where it could have been retried.
    """

    def full(*given: Any) -> Any:
        raise StoreFull("s3://hanzo-ml/checkpoints: no space is left")

    work = tmp_path / f"full-{expected.__name__}"
    with monkeypatch.context() as patched:
        patched.setattr(upload, "RETRY_PAUSES_SECONDS", ())
        patched.setattr(RemoteCheckpoints, "send", full)
        with pytest.raises(expected, match=r"multiplied|did not fit"):
            place.train(work, eval_steps=None)
    assert "the newest checkpoint is on this machine alone" in capsys.readouterr().out
    with pytest.raises(expected):
        place.train(work, eval_steps=None)
    assert place.checkpoints(work).stored_steps() == [2], "as it goes on, it is made up for"


def test_failed_part_upload_message_names_the_part(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other machines have their own parts.

    The message used to say that the whole checkpoint was on this machine alone.
    """

    def full(*given: Any) -> Any:
        raise StoreFull("no space is left")

    monkeypatch.setattr(upload, "RETRY_PAUSES_SECONDS", ())
    monkeypatch.setattr(RemoteCheckpoints, "send", full)
    checkpoints = place.checkpoints(tmp_path / "second")
    course = RunState(place.recipe, ProcessGroup(), checkpoints, checkpoints.uri, None, RecoveryLog(), (), ())
    with checkpoints.save(6, {PART_KEY: CheckpointPart(number=2, of=2, save="a").model_dump(mode="json")}) as folder:
        (folder / "rows-2").write_text("6")
    program.wait_for_uploads(course, resumes_later=True)
    assert "part 2 of 2 of the newest checkpoint is on this machine alone: no space is left" in capsys.readouterr().out


@pytest.mark.parametrize("failing", [NO_MEMORY], indirect=True)
def test_out_of_memory_event_is_recorded_before_waiting_for_uploads(
    place: Place, tmp_path: Path, failing: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes wait for this one, and abort it after 15 minutes.

    The run then restarted with the micro-batch that had not fit.
    """
    send = RemoteCheckpoints.send

    def patient(*given: Any) -> Any:
        assert failing.wait(60)
        end = time.monotonic() + 60
        while not read_recovery_log(place.store, CHECKPOINTS.format("written")).entries:
            assert time.monotonic() < end
            time.sleep(0.01)
        return send(*given)

    monkeypatch.setattr(RemoteCheckpoints, "send", patient)
    monkeypatch.setattr(upload, "RETRY_PAUSES_SECONDS", ())
    with pytest.raises(Restart):
        place.train(tmp_path / "written", eval_steps=None)
    assert place.checkpoints(tmp_path / "written").stored_steps() == [2]


@pytest.mark.parametrize(("added", "expected"), [(0, 2**32 - 1), (1, 0), (2**33, 2**32 - 1)])
def test_largest_seed_is_wrapped_for_each_process(added: int, expected: int) -> None:
    """NumPy seeds have at most 32 bits.

    With the largest seed, a run in two processes could not start.
    """
    assert wrap_seed(2**32 - 1 + added) == expected
    set_seed(wrap_seed(2**32 - 1 + added))
