"""Detached processes: identified by their lock, never duplicated, stoppable after their starter's death."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from resources.settings.settings import Settings
from resources.stack.detached_process import (
    LOG_FILE,
    PID_FILE,
    WORKERS_VARIABLE,
    is_running,
    kill_orphans,
    lock_folder,
    send_signal,
    start_detached,
    stop_process,
    write_json_atomic,
)
from resources.stack.lifecycle import down
from tests.resources.launching import WAITS, launch

ROOT = Path(__file__).resolve().parents[3]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); time.sleep(600)",
]


def until(what: str, look: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def begun(folder: Path) -> bool:
    return (folder / LOG_FILE).is_file() and "begun" in (folder / LOG_FILE).read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if is_running(tmp_path) and (tmp_path / PID_FILE).is_file():
        os.killpg(json.loads((tmp_path / PID_FILE).read_text()), signal.SIGKILL)


def test_fresh_folder_has_no_running_process(folder: Path) -> None:
    assert not is_running(folder)
    assert list(folder.iterdir()) == []
    stop_process(folder, 1)


def test_process_counts_as_running_from_its_start_to_its_end(folder: Path) -> None:
    assert launch(folder, WAITS)
    assert is_running(folder)
    os.kill(json.loads((folder / PID_FILE).read_text()), signal.SIGKILL)
    until("its end", lambda: not is_running(folder))


def test_a_second_start_does_not_start_a_second_one(folder: Path) -> None:
    assert launch(folder, WAITS)
    first = (folder / PID_FILE).read_text()
    assert not launch(folder, WAITS)
    assert (folder / PID_FILE).read_text() == first


def test_concurrent_starters_start_one_process(folder: Path) -> None:
    text = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "from tests.resources.launching import launch, WAITS; print(launch(Path(sys.argv[1]), WAITS))"
    )
    command = [sys.executable, "-c", text, str(folder), str(ROOT)]
    starters = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [starter.communicate()[0].strip() for starter in starters]
    assert sorted(answers) == ["False", "False", "False", "True"]


def test_a_process_outlives_its_starter_and_is_found_by_another(folder: Path) -> None:
    text = (
        "import os, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "from tests.resources.launching import launch, WAITS; launch(Path(sys.argv[1]), WAITS);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", text, str(folder), str(ROOT)], check=False)
    assert done.returncode == -signal.SIGKILL
    until("its first line", lambda: begun(folder))
    assert is_running(folder)
    stop_process(folder, 20)
    assert not is_running(folder)


DIES_BEFORE_IT_REMEMBERS = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from resources.stack import detached_process
from tests.resources.launching import WAITS, launch
detached_process.write_json_atomic = lambda path, document: os.kill(os.getpid(), signal.SIGKILL)
launch(Path(sys.argv[1]), WAITS)
"""


def test_a_process_whose_starter_died_before_it_wrote_the_process_id_can_be_ended(folder: Path) -> None:
    """`kill -9` before the id is stored leaves a held lock, but no id."""
    subprocess.run([sys.executable, "-c", DIES_BEFORE_IT_REMEMBERS, str(folder), str(ROOT)], check=False)
    until("its first line", lambda: begun(folder))
    assert is_running(folder)
    text = (
        "import sys; from pathlib import Path; from resources.stack.detached_process import stop_process; "
        "stop_process(Path(sys.argv[1]), 0.2)"
    )
    stopping = subprocess.Popen([sys.executable, "-c", text, str(folder)], cwd=ROOT)
    try:
        stopping.wait(8)
    except subprocess.TimeoutExpired:
        stopping.kill()
        stopping.wait()
        kill_holders(folder / "lock")
        pytest.fail("stop never came back: it waits for a process to which it never sends a signal")
    assert not is_running(folder)


def kill_holders(path: Path) -> None:
    """Kill the holders of the file so that a failed test leaves no processes."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(fd.readlink() == path for fd in (process / "fd").iterdir()):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue


def test_the_process_id_of_an_earlier_process_is_never_signalled(folder: Path) -> None:
    """An unrelated process has reused the number that is still in the file."""
    innocent = subprocess.Popen(WAITS, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        write_json_atomic(folder / PID_FILE, innocent.pid)
        stop_process(folder, 1)
        send_signal(folder, signal.SIGKILL)
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_a_stubborn_process_is_killed_when_the_grace_is_over(folder: Path) -> None:
    launch(folder, STUBBORN)
    until("its first line", lambda: begun(folder))
    stop_process(folder, 0.2)
    assert not is_running(folder)


def test_the_children_get_the_signal_too(folder: Path) -> None:
    child = "import time; print('begun', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid); p.wait()"
    launch(folder, [sys.executable, "-uc", parent])
    until("the child's first line", lambda: begun(folder))
    number = int(next(line for line in (folder / LOG_FILE).read_text().split() if line.isdigit()))
    stop_process(folder, 20)
    until("the child's end", lambda: state_of(number) == "Z")


def state_of(number: int) -> str:
    try:
        return Path(f"/proc/{number}/stat").read_text().split(")")[1].split()[0]
    except FileNotFoundError:
        return "Z"


def test_start_appends_to_the_log_and_adds_to_the_environment(folder: Path) -> None:
    speaks = [sys.executable, "-c", "import os; print('said', os.environ['ADDED'], 'PATH' in os.environ)"]
    for _ in range(2):
        assert launch(folder, speaks)
        until("its end", lambda: not is_running(folder))
    assert (folder / LOG_FILE).read_text() == "said yes True\n" * 2


def test_checking_a_process_does_not_prevent_a_start(folder: Path) -> None:
    """Monitors check constantly; a start that finds the lock held does nothing."""
    (folder / "lock").touch()
    text = (
        "import sys; from pathlib import Path; from resources.stack.detached_process import "
        "is_running\nprint('begun', flush=True)\n"
    )
    text += "while True: is_running(Path(sys.argv[1]))"
    looking = subprocess.Popen([sys.executable, "-c", text, str(folder)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert looking.stdout is not None and looking.stdout.readline() == b"begun\n"
        refused = 0
        for _ in range(20_000):
            with lock_folder(folder) as descriptor:
                refused += descriptor is None
        assert refused == 0
    finally:
        looking.kill()
        looking.wait()


def test_running_process_is_recognized_on_a_read_only_disk(folder: Path) -> None:
    """A broken disk becomes read-only; the stack on it must still be stoppable."""
    launch(folder, WAITS)
    look = "import sys; from pathlib import Path; from resources.stack.detached_process import is_running\n"
    look += "print(is_running(Path(sys.argv[1])))"
    read_only = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && ! touch "$0/new" 2>&- && exec "$@"'
    assert with_mounts_of_its_own(read_only, folder, look) == "True\n"


def test_process_whose_id_cannot_be_written_does_not_run(folder: Path) -> None:
    """It could not be stopped, and its starter waited forever."""
    three_files = 'mount -t tmpfs -o nr_inodes=3 tmpfs "$0" && exec "$@"'  # the folder, its lock and its log
    begin = "import sys; from pathlib import Path; from resources.stack.detached_process import is_running\n"
    begin += "from tests.resources.launching import launch\n"
    begin += "try: launch(Path(sys.argv[1]), ['sleep', '600'])\nexcept OSError as error: print(error.strerror)\n"
    begin += "print(is_running(Path(sys.argv[1])))"
    assert with_mounts_of_its_own(three_files, folder, begin) == "No space left on device\nFalse\n"


def with_mounts_of_its_own(mount: str, folder: Path, program: str) -> str:
    """Run a program on a folder after a mount in a private namespace.

    Returns its output.
    """
    shell = ["unshare", "--mount", "--map-root-user", "--pid", "--fork", "--kill-child", "sh", "-c", mount, str(folder)]
    command = [*shell, sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    if "unshare" in done.stderr:
        pytest.skip(f"no namespace of its own: {done.stderr.strip()}")
    return done.stdout + done.stderr


def test_a_document_is_written_whole_or_not_at_all(folder: Path) -> None:
    write_json_atomic(folder / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(folder / "x.json", {"a": object()})
    assert json.loads((folder / "x.json").read_text()) == {"a": 1}


LEAVES = """
import subprocess, sys, time
wait = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(wait).pid, subprocess.Popen(wait, start_new_session=True).pid, "begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("other", [True, False])
def test_remaining_processes_of_a_killed_worker_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """`hanzo-ml down` stops them.

    It spares processes in a session of their own, and an unrelated group with the same number.
    """
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path / "home"))
    settings = Settings.load()
    folder = settings.run_workers / "run"
    folder.mkdir(parents=True)
    with lock_folder(folder) as descriptor:
        assert descriptor is not None
        workers = tmp_path / "others" if other else folder.parent
        start_detached([sys.executable, "-c", LEAVES], folder, descriptor, cwd=None, env={WORKERS_VARIABLE: str(workers)})
    until("what it leaves", lambda: begun(folder))
    left, apart = map(int, (folder / LOG_FILE).read_text().split()[:2])
    try:
        kill_orphans(folder)
        assert is_running(folder) and lives(left), "it is there still"
        os.kill(json.loads((folder / PID_FILE).read_text()), signal.SIGKILL)
        until("its end", lambda: not is_running(folder))
        down(settings, Console(quiet=True))
        if not other:
            until("the end of what it left", lambda: not lives(left))
        assert (lives(left), lives(apart)) == (other, True)
    finally:
        for process_id in filter(lives, (left, apart)):
            os.kill(process_id, signal.SIGKILL)


def lives(process_id: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    status = Path(f"/proc/{process_id}/stat")
    return status.is_file() and status.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")


def test_document_is_flushed_before_it_is_renamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a power failure left an empty file in place of a job's attempt number."""
    done: list[str] = []
    flush, rename = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        done.append(f"flushed {os.fstat(descriptor).st_size} bytes")
        flush(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append(f"renamed to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    write_json_atomic(folder / "attempt.json", 12)
    assert done == ["flushed 2 bytes", "renamed to attempt.json"]
