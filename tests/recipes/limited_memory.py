"""A program as a process of its own that gets no more data memory than it is given."""

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_within(limit: int, program: str, job_file: Path) -> subprocess.CompletedProcess[str]:
    """Run a module with a job file. Each of its processes may have `limit` bytes."""
    return subprocess.run(
        [sys.executable, "-m", program, str(job_file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        check=False,
    )
