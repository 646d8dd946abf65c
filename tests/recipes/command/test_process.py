"""Classification of a command's end by exit code and stderr."""

import os
from pathlib import Path

import pytest

from recipes.command.process import MAX_KEPT_BYTES, OutputTail, failure_summary, killing_signal

OF_TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank1]: ValueError: no such column
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:5511
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : here
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 17)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
KILLED = "  exitcode  : -9 (pid: 17)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 17\n"
ABORTED = "  traceback : Signal 6 (SIGABRT) received by PID 17\n"


@pytest.mark.parametrize(
    ("code", "errors", "expected"),
    [
        (0, "", None),
        (1, "", None),
        (3, "Killed", None),
        (-9, "", "SIGKILL"),
        (-11, "", "SIGSEGV"),
        (137, "", "SIGKILL"),  # exit code of a shell whose child was killed
        (255, "", None),
        (1, KILLED, "SIGKILL"),
        (1, ABORTED, None),  # follows from another process, which failed by itself
        (1, OF_TORCHRUN, None),
    ],
)
def test_killing_signal_is_distinguished_from_error(code: int, errors: str, expected: str | None) -> None:
    assert killing_signal(code, errors) == expected


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ("", ""),
        ("\n \n", ""),
        ("it is too late\n====\n", "it is too late"),
        ("Traceback (most recent call last):\nKeyError: 'loss'\nException ignored in: <x>\n", "KeyError: 'loss'"),
        ("AssertionError\n", "AssertionError"),
        ("my.own.BadError: two\nINFO: bye\n", "my.own.BadError: two"),
        (OF_TORCHRUN, "[rank1]: ValueError: no such column"),
        (f"ValueError: {'x' * 1000}", f"ValueError: {'x' * 488}"),
    ],
)
def test_failure_reason_is_one_line(errors: str, expected: str) -> None:
    assert failure_summary(errors) == expected


def test_piped_output_is_forwarded_whole_and_its_tail_kept(tmp_path: Path) -> None:
    source, sink = os.pipe()
    text = b"".join(b"%d\r" % number for number in range(3000))
    os.write(sink, text * 3)
    os.close(sink)
    tail = OutputTail()
    with (tmp_path / "log").open("wb") as log:
        tail.forward(source, log.fileno())
    os.close(source)
    assert (tmp_path / "log").read_bytes() == text * 3
    assert tail.text.encode() == (text * 3)[-MAX_KEPT_BYTES:]


def test_full_log_disk_does_not_block_the_command() -> None:
    source, sink = os.pipe()
    os.write(sink, b"ValueError: late\n")
    os.close(sink)
    tail = OutputTail()
    with Path("/dev/full").open("wb") as full:
        tail.forward(source, full.fileno())
    os.close(source)
    assert tail.text == "ValueError: late\n"
