"""Run a program in a process with limited data memory."""

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_within(limit: int, program: str, job_file: Path) -> subprocess.CompletedProcess[str]:
    """Run a module with a job file; each of its processes may use `limit` bytes."""
    return subprocess.run(
        [sys.executable, "-m", program, str(job_file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        check=False,
    )
