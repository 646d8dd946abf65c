"""Exit code of a multi-process job: the first failure's, or killed if any was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, EXIT_FILE, EXIT_PREEMPTED, EXIT_RESTART
from recipes.torchrun import choose_exit_code, first_exit_codes
from tests.end_to_end.local_stack import is_pending, wait_until
from tests.support.recipes.command_program import ROOT, CommandJobs

SAYS = """
import json, os, pathlib, signal, sys, time
work = pathlib.Path(json.loads(pathlib.Path(sys.argv[1]).read_text())["work_dir"])
def say(code):
    (work / "exit.json").write_text(json.dumps({"code": code, "message": "why"}))
    sys.exit(code)
def be_killed():
    (work / "pid.tmp").write_text(str(os.getpid()))
    (work / "pid.tmp").rename(work / "pid")
    os.kill(os.getpid(), signal.SIGKILL)
def await_death():
    while not (work / "pid").exists(): time.sleep(0.01)
    stat = pathlib.Path("/proc", (work / "pid").read_text(), "stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z": time.sleep(0.001)
"""


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([EXIT_BAD_CONFIGURATION], EXIT_BAD_CONFIGURATION),
        ([EXIT_PREEMPTED, 1], EXIT_PREEMPTED),
        ([1, EXIT_BAD_CONFIGURATION], EXIT_BAD_CONFIGURATION),  # the other failed as a consequence
        ([EXIT_PREEMPTED, EXIT_RESTART], EXIT_RESTART),
        ([EXIT_PREEMPTED, -15], EXIT_PREEMPTED),
        ([1, -9], 137),  # the other failed as a consequence
        ([-9, EXIT_PREEMPTED], 137),  # torchrun stopped the other, which saved a checkpoint
        ([-11], 139),
        ([-15, EXIT_BAD_CONFIGURATION], EXIT_BAD_CONFIGURATION),
        ([-9, EXIT_RESTART], EXIT_RESTART),
        ([1, -15], 1),
        ([-15, -15], EXIT_PREEMPTED),
    ],
)
def test_exit_code_of_processes_is_passed_on(codes: list[int], expected: int) -> None:
    assert choose_exit_code(codes) == expected


def test_only_processes_failing_with_the_first_determine_exit_code() -> None:
    """Regression: torchrun's SIGKILL of a slow peer counted, so bad configurations were retried twelve times."""
    times = {0: 100, 1: 101, 2: 102, 3: 160}
    failures = [ProcessFailure(rank, 1, code, "none") for rank, code in enumerate((EXIT_BAD_CONFIGURATION, 1, -15, -9))]
    for failure in failures:
        failure.timestamp = times[failure.local_rank]
    assert first_exit_codes(failures) == first_exit_codes(failures[::-1])[::-1] == [EXIT_BAD_CONFIGURATION, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "expected", "reported"),
    [
        (f"say({EXIT_BAD_CONFIGURATION})", "time.sleep(60)", EXIT_BAD_CONFIGURATION, True),
        ("time.sleep(60)", f"say({EXIT_RESTART})", EXIT_RESTART, True),
        ("say(1)", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", 1, True),
        ("await_death(); say(1)", "be_killed()", 137, False),
    ],
)
def test_own_exit_is_reported_and_a_kill_counts_as_kill(
    tmp_path: Path, first: str, second: str, expected: int, reported: bool
) -> None:
    """torchrun ends the other process at once, or by SIGKILL after an ignored SIGTERM."""
    job = CommandJobs(tmp_path).job("")
    work = Path(job.work_dir)
    work.mkdir(parents=True)
    job_file = work / "job.json"
    job_file.write_text(job.model_dump_json())
    program = f"{SAYS}\nif os.environ['RANK'] == '0':\n    {first}\nelse:\n    {second}\n"
    shape = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    options = (*shape, "--shutdown-timeout=4", "--no-python")
    command = [sys.executable, "-m", "recipes.torchrun", *options, sys.executable, "-c", program, str(job_file)]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120, check=False)
    assert (ended.returncode, (work / EXIT_FILE).exists()) == (expected, reported)


SLOW_TO_END = """
import os, pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
while not asked: time.sleep(0.01)
pathlib.Path(sys.argv[1], "asked" + os.environ["RANK"]).touch()
while not pathlib.Path(sys.argv[1], "end").exists(): time.sleep(0.01)
sys.exit(143)
"""


@pytest.mark.slow
def test_repeated_sigterm_is_forwarded_once(tmp_path: Path) -> None:
    """Regression: a second SIGTERM restarted the wait, which once hung on an ended process."""
    options = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    command = [sys.executable, "-m", "recipes.torchrun", *options, "--shutdown-timeout=60", "--no-python"]
    command += [sys.executable, "-c", SLOW_TO_END, str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=log)
    wait_until("both", lambda: all((tmp_path / rank).exists() for rank in "01"))
    running.terminate()
    wait_until("the first signal", lambda: all((tmp_path / f"asked{rank}").exists() for rank in "01"))
    running.terminate()
    wait_until("the second signal", lambda: not is_pending(running.pid, signal.SIGTERM))
    time.sleep(0.5)
    (tmp_path / "end").touch()
    assert running.wait(60) == EXIT_PREEMPTED
    assert (tmp_path / "log").read_text().count("closing signal SIGTERM") == 2
