"""A process that begins anew where the clock was put back below it."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, threading
from resources.daemon import begin_anew_where_put_back

over = threading.Event()
seen = iter({seen})

def clock():
    try:
        return next(seen)
    except StopIteration:
        over.set()
        return {seen}[-1]

print(os.getpid(), os.fstat({descriptor}).st_ino, flush=True)
if "BEGUN" not in os.environ:
    os.environ["BEGUN"] = "once"
    begin_anew_where_put_back(clock, lambda: 0.0, 0.001)
    over.wait()
    print("went on")
"""


@pytest.mark.parametrize(
    ("seen", "anew"),
    [
        ([7200.0, 7200.0, 0.0], True),
        ([0.0, 7200.0, 7200.0], False),
        ([7200.0, 7195.0, 7190.0, 7185.0], False),
    ],
    ids=["put back", "put forward", "corrected"],
)
def test_a_daemon_begins_anew_where_the_clock_was_put_back(tmp_path: Path, seen: list[float], anew: bool) -> None:
    """As the same process, with what its starter gave it: the lock."""
    with (tmp_path / "lock").open("w") as lock:
        program = PROGRAM.format(seen=seen, descriptor=lock.fileno())
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, pass_fds=[lock.fileno()], timeout=60
        )
    first, *others = done.stdout.splitlines()
    assert others == (["the clock was put back by 7200 s: the daemon begins anew", first] if anew else ["went on"])
