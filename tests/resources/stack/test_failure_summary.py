"""Failure summary of an ended service, extracted from real Python logs."""

import json
import subprocess
import sys

import pytest

from resources.stack.failure_summary import failure_summary

CHAIN = """
try:
    try:
        raise ValueError("defs.yaml:4\\n  no such key")
    except ValueError as error:
        raise KeyError("the component") from error
except KeyError as error:
    raise RuntimeError("while loading\\nmodule_name=definitions") from error
"""
ALONE = "raise OSError('the disk is full')"
WHILE_HANDLED = """
try:
    raise ValueError("handled")
except ValueError:
    raise OSError("not handled")
"""


def log_of(*programs: str) -> str:
    ended = [subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False) for text in programs]
    return "begins\n" + "".join(f"started\n{process.stderr}" for process in ended)


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ((), "begins"),
        (("import sys; sys.exit('hanzo-ml: port 3000 is in use')",), "hanzo-ml: port 3000 is in use"),
        ((ALONE,), "OSError: the disk is full"),
        ((CHAIN,), "ValueError: defs.yaml:4 no such key"),
        ((ALONE, CHAIN), "ValueError: defs.yaml:4 no such key"),
        ((CHAIN, ALONE), "OSError: the disk is full"),
        ((WHILE_HANDLED,), "OSError: not handled"),
    ],
)
def test_summary_is_the_cause_of_the_failure(programs: tuple[str, ...], said: str) -> None:
    assert failure_summary(log_of(*programs)) == said


def test_summary_of_an_empty_log_says_so() -> None:
    assert failure_summary("") == "it wrote nothing"


def test_summary_reads_lines_of_a_json_log() -> None:
    error = {
        "level": "error",
        "message": "cannot start",
        "exception": "Traceback (most recent call last):\n  x\nOSError: full",
    }
    assert failure_summary(json.dumps({"level": "error", "message": "port 8057 is taken"})) == "port 8057 is taken"
    assert failure_summary(json.dumps(error) + "\n") == "OSError: full"
    assert failure_summary('{"no": "message"}') == '{"no": "message"}'
