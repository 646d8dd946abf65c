"""How programs end: the exit code for the supervisor, the reason in `exit.json` and stderr."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from recipes.contracts.exit_reason import NO_ROOM, ExitDocument, ExitReason, read_exit_document
from recipes.contracts.job import Job, Program, Result, StoreAddress
from recipes.storage.artifact_store import Store

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
RESULT = "s3://hanzo-ml/runs/r/result.json"
OPEN = "[enforce fail at inline_container.cc:747] . open file failed with strerror: {}"
"""Error message of torch.save."""
HEAD = """
import errno
from recipes.runner import Preempted, ProgramFailed, Restart, main
from recipes.storage.buckets import StoreFull, StoreRefuses, StoreUnavailable
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration, Result
from recipes.storage.artifact_store import BrokenArtifact

def program(job, store, work):
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(
        id="r",
        program=Program.TRAIN,
        result_uri=RESULT,
        store=StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS),
        work_dir=str(tmp_path / "deep" / "work"),
        cache_dir=str(tmp_path / "cache"),
    )


def run(job: Job, tmp_path: Path, *body: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "job.json").write_text(job.model_dump_json())
    text = HEAD + "".join(f"    {line}\n" for line in body) + "main(program)\n"
    command = [sys.executable, "-c", text, str(tmp_path / "job.json")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def said(job: Job) -> dict[str, object]:
    return dict(json.loads((Path(job.work_dir) / "exit.json").read_text()))


def last_error(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("end", "code"), [("return Result(work_digest=job.work_digest)", None), ("raise ProgramFailed('it is no model')", 1)]
)
def test_endless_thread_does_not_keep_a_finished_program_alive(job: Job, tmp_path: Path, end: str, code: int | None) -> None:
    waits = "import threading, recipes.runner; recipes.runner.EXIT_SECONDS = 1"
    done = run(job, tmp_path, waits, "threading.Thread(target=threading.Event().wait).start()", end)
    assert "Thread" in done.stderr and "in wait" in done.stderr, "the log has what it was at"
    if code is None:
        assert Result.model_validate_json(Store(job.store).get_bytes(RESULT)).work_digest == job.work_digest
    else:
        assert said(job) == {"code": code, "message": "it is no model", "reason": "program_error"}


def test_computing_thread_does_not_abort_a_finished_program(job: Job, tmp_path: Path) -> None:
    """Regression: the thread requested the interpreter during its shutdown, which aborted the process."""
    multiplies = "threading.Thread(target=lambda: [some @ some for _ in iter(int, 1)], daemon=True).start()"
    begins = ("import threading, time, torch", "some = torch.ones(9, 9)", multiplies, "time.sleep(0.1)")
    ends = ("print('the last words', end='')", "return Result(work_digest=job.work_digest)")
    done = run(job, tmp_path, *begins, *ends)
    assert (done.returncode, done.stdout[-14:]) == (0, "the last words"), done.stderr
    (tmp_path / "deep" / "work" / "exit.json").unlink(missing_ok=True)
    failed = run(job, tmp_path, *begins, "raise ProgramFailed('it is no model')")
    assert failed.returncode == 1, failed.stderr


def test_successful_program_exits_0_and_stores_its_result(job: Job, tmp_path: Path) -> None:
    done = run(job, tmp_path, "return Result(work_digest=job.work_digest, metrics={'steps': 3.0})")
    assert done.returncode == 0, done.stderr
    found = Result.model_validate_json(Store(job.store).get_bytes(RESULT))
    assert found == Result(work_digest=job.work_digest, metrics={"steps": 3.0}, machine=found.machine)
    assert found.machine is not None and found.machine.packages["torch"] == version("torch")
    assert not (Path(job.work_dir) / "exit.json").exists()


@pytest.mark.parametrize(
    ("statement", "code", "reason", "line"),
    [
        ("raise BadConfiguration('unknown recipe: correct it')", 78, "bad_configuration", "unknown recipe: correct it"),
        ("raise BrokenArtifact('s3://x has other bytes')", 78, "bad_configuration", "s3://x has other bytes"),
        ("raise Preempted('checkpoint 3 holds everything')", 143, "preempted", "preempted: checkpoint 3 holds everything"),
        (
            "raise StoreUnavailable('no answer')",
            75,
            "storage_unavailable",
            "starting again: the object store does not answer, or refuses: ",
        ),
        ("raise StoreRefuses('wrong key')", 75, "storage_denied", "starting again: the object store refuses: wrong key"),
        ("raise ProgramFailed('the command exited with 3: late')", 1, "program_error", "the command exited with 3: late"),
        ("raise ValueError('first line\\n  second line')", 1, "program_error", "ValueError: first line second line"),
        (
            "raise PermissionError(13, 'Permission denied', '/root')",
            1,
            "program_error",
            "PermissionError: [Errno 13] Permission",
        ),
        (
            "raise OSError(errno.ENOSPC, 'No space left on device', '/w')",
            1,
            "storage_full",
            "no space left for /w: free some space",
        ),
        ("raise OSError(errno.EDQUOT, 'Quota exceeded')", 1, "storage_full", "no space left for "),
        (f"raise RuntimeError({OPEN.format('No space left on device')!r})", 1, "storage_full", "no space left for "),
        (f"raise RuntimeError({OPEN.format('Disk quota exceeded')!r})", 1, "storage_full", "no space left for "),
        (f"raise RuntimeError({OPEN.format('Read-only file system')!r})", 1, "storage_read_only", "the file system of "),
        ("raise OSError(errno.EROFS, 'Read-only', '/w')", 1, "storage_read_only", "the file system of /w is read-only, "),
        ("raise Exception('I/O: Read-only file system (os error 30)')", 1, "storage_read_only", "the file system of "),
        ("raise StoreFull('s3://x/y: no space is left')", 1, "storage_full", "no space left for s3://x/y: free some space"),
        ("raise Restart('on with half the batch')", 75, "restart_requested", "starting again: on with half"),
        ("raise Restart('the command was killed', ExitReason.KILLED)", 75, "killed", "starting again: the "),
        ("raise ProgramFailed('exit 1: no memory', ExitReason.OUT_OF_MEMORY)", 1, "out_of_memory", "exit 1: no "),
        ("raise MemoryError('no 9 GB')", 1, "out_of_memory", "MemoryError: no 9 GB"),
        ("raise RuntimeError('CUDA error: out of memory')", 1, "out_of_memory", "RuntimeError: CUDA error: "),
        ("return {}['missing']", 1, "program_error", "KeyError: 'missing'"),
        ("raise SystemExit('bye')", 1, "program_error", "something called sys.exit: bye"),
    ],
)
def test_exit_code_last_line_and_exit_file_agree(
    job: Job, tmp_path: Path, statement: str, code: int, reason: str, line: str
) -> None:
    done = run(job, tmp_path, statement)
    assert done.returncode == code, done.stderr
    assert last_error(done).startswith(f"error: {line}")
    assert said(job) == {"code": code, "message": last_error(done).removeprefix("error: "), "reason": reason}
    assert not Store(job.store).list("s3://hanzo-ml/runs/r")


@pytest.mark.parametrize(
    "end", ["BrokenArtifact('model is missing')", "FileNotFoundError(2, 'no', 'model')", "ProgramFailed('no')"]
)
def test_program_exits_for_restart_when_its_store_is_unmounted(job: Job, tmp_path: Path, end: str) -> None:
    """Files read directly from the store folder are then missing."""
    store = Store(job.store)
    store.put_bytes("s3://hanzo-models/base/b/model", b"x")
    away = f"import os; os.rename({str(tmp_path / 'objects')!r}, {str(tmp_path / 'away')!r})"
    done = run(job, tmp_path, away, f"raise {end}")
    assert (done.returncode, said(job)["code"], said(job)["reason"]) == (75, 75, "storage_unavailable"), done.stderr
    assert last_error(done).startswith("error: starting again: the object store is away: ")


@pytest.mark.parametrize(
    "error", ["BadConfiguration('no')", "BrokenArtifact('no')", "Preempted('yes')", "ProgramFailed('no')"]
)
def test_expected_error_prints_no_traceback(job: Job, tmp_path: Path, error: str) -> None:
    assert "Traceback" not in run(job, tmp_path, f"raise {error}").stderr


def test_full_disk_prints_no_traceback(job: Job, tmp_path: Path) -> None:
    done = run(job, tmp_path, "raise OSError(errno.ENOSPC, 'No space left on device', '/w')")
    assert done.stderr.count("\n") == 1, done.stderr


def test_full_disk_is_recognized_in_a_folder_copy_error(job: Job, tmp_path: Path) -> None:
    """On restoring a checkpoint, shutil lists each failed file and has no errno itself."""
    folder = Path(job.work_dir) / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"x" * 4000)
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    done = run(job, tmp_path, "import resource, shutil", limit, "shutil.copytree(work / 'checkpoint', work / 'restored')")
    assert done.returncode == 1
    assert last_error(done).startswith(f"error: no space left for {job.work_dir}: free some space"), done.stderr


def test_unexpected_error_keeps_its_traceback(job: Job, tmp_path: Path) -> None:
    assert "Traceback" in run(job, tmp_path, "return 1 / 0").stderr


def test_exit_message_is_stripped_of_control_and_unstorable_characters(job: Job, tmp_path: Path) -> None:
    """Regression: an unpaired surrogate is not JSON, so the program counted as killed and restarted."""
    run(job, tmp_path, r"raise ValueError('\x1b[31mbad\x1b[0m\nname \udcff \x00 \x9b2J')")
    assert said(job) == {"code": 1, "message": "ValueError: bad name \ufffd \ufffd \ufffd2J", "reason": "program_error"}
    assert read_exit_document(Path(job.work_dir)) == ExitDocument.model_validate(said(job))


FULL = ("import resource", "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
"""As on a full disk, files can be created but not written."""


def test_exit_without_space_for_the_exit_file_is_not_classified_as_killed(job: Job, tmp_path: Path) -> None:
    done = run(job, tmp_path, *FULL, "raise ProgramFailed('it is no model')")
    assert (done.returncode, last_error(done)) == (1, "error: it is no model")
    assert read_exit_document(Path(job.work_dir)) == ExitDocument(code=None, message=NO_ROOM, reason=ExitReason.UNKNOWN)
    assert [file.name for file in Path(job.work_dir).iterdir()] == ["exit.json"]
    run(job, tmp_path, "raise ProgramFailed('closed by peer')")
    found = ExitDocument(code=1, message="closed by peer", reason=ExitReason.PROGRAM_ERROR)
    assert read_exit_document(Path(job.work_dir)) == found, "who has room says what it knows"


@pytest.mark.parametrize("left", ["", '{"code": 1, "mess', "null"])
def test_truncated_exit_file_has_unknown_reason(tmp_path: Path, left: str) -> None:
    (tmp_path / "exit.json").write_text(left)
    assert read_exit_document(tmp_path) == ExitDocument(code=None, message=NO_ROOM, reason=ExitReason.UNKNOWN)


def test_killed_program_writes_no_exit_file(job: Job, tmp_path: Path) -> None:
    done = run(job, tmp_path, "import os, signal", "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -9
    assert not (Path(job.work_dir) / "exit.json").exists()


def test_unstorable_result_is_an_error(job: Job, tmp_path: Path) -> None:
    blocked = tmp_path / "objects"
    blocked.write_text("a file where the store should be")
    done = run(job, tmp_path, "return Result(work_digest=job.work_digest)")
    assert done.returncode == 1
    assert last_error(done).startswith("error: ")
    assert said(job)["code"] == 1


def test_first_exit_message_of_several_processes_is_kept(job: Job, tmp_path: Path) -> None:
    run(job, tmp_path, "raise BadConfiguration('no such target: use q_proj')")
    run(job, tmp_path, "raise RuntimeError('connection closed by peer')")
    assert said(job)["message"] == "no such target: use q_proj"
