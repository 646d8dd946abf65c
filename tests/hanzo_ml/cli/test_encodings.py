"""Terminals that lack characters do not crash a command.

`model prove` crashed on its check mark, with the exit code of a broken edge.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(program: str, encoding: str) -> subprocess.CompletedProcess[bytes]:
    text = f"from hanzo_ml.cli.output import *\nadapt_streams()\n{program}"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run([sys.executable, "-c", text], cwd=ROOT, env=environment, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("ascii", "+ proved ^ parent ... z?rich ?"),
        ("latin-1", "+ proved ^ parent ... zürich ?"),
        ("utf-8", "✓ proved ↑ parent … zürich 字"),
    ],
)
def test_characters_missing_in_the_terminal_encoding_are_replaced(encoding: str, printed: str) -> None:
    done = run("from rich.console import Console\nConsole().print('✓ proved ↑ parent … zürich 字', markup=False)", encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding).strip() == printed


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_output_is_unchanged_in_any_encoding(encoding: str) -> None:
    done = run("print_json({'name': 'zürich 字 ✓'})", encoding)
    assert json.loads(done.stdout.decode(encoding)) == {"name": "zürich 字 ✓"}, done.stderr


def test_errors_are_printed_in_ascii_terminals(tmp_path: Path) -> None:
    code = "from hanzo_ml.cli import main; main()"
    command = [sys.executable, "-c", code, "job", "submit", "--config", str(tmp_path / "zürich.yaml")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 1 and b"there is no file" in done.stderr and b"z?rich.yaml" in done.stderr
