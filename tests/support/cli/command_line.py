"""Command line, run in the test's process."""

import io
import os
import subprocess
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from hanzo_ml.cli import main
from tests.support.server_process import ServerProcess

Cli = Callable[..., subprocess.CompletedProcess[str]]


def run(uri: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process.

    Starting Python forty times would take most of the time. See `run_for_real`.
    """
    out, err = io.StringIO(), io.StringIO()
    variables = {"HANZO_ML_TRACKING_URI": uri, "COLUMNS": "40"}
    with redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ, variables), patch("sys.argv", ["x", *arguments]):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
        except Exception:  # unhandled, so Python would print it and exit with 1
            err.write(traceback.format_exc())
            code = 1
    assert isinstance(code, int)
    return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())


@pytest.fixture
def cli(server: ServerProcess) -> Cli:
    return lambda *arguments: run(server.url, *arguments)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the single line of a refusal."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.strip()


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(content: str | bytes, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def create(cli: Cli, path: Path, name: str = "d") -> subprocess.CompletedProcess[str]:
    return cli("dataset", "create", "--name", name, "--path", str(path))
