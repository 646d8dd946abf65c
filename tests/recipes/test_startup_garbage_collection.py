"""Garbage collection skips startup imports, a third of the start time, but covers the work."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEGINS = """
import gc, runpy, sys
searched = []
gc.callbacks.append(lambda phase, what: searched.append(what["generation"]))
try:
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)  # it ends at once, for want of a job
except (FileNotFoundError, SystemExit):
    print("torch" in sys.modules, gc.isenabled(), searched.count(2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train", "torchrun"])
def test_garbage_collection_is_off_until_program_begins(program: str) -> None:
    command = [sys.executable, "-c", BEGINS, f"recipes.{program}", "--unknown"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True", "0"], done.stdout + done.stderr
