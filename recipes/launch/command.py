"""Command line and environment of a pod's program, with or without torchrun."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from recipes.contracts.job import Job
from recipes.launch.pod import RENDEZVOUS_SECONDS, Pod
from recipes.storage.signed_bucket import ATTEMPT_VARIABLE

RANK_LOGS = "processes"
"""Folder for the output of all ranks of a node but the first; errors of all ranks are in the log."""


def program_command(job: Job, pod: Pod, job_file: Path) -> list[str]:
    """Return the command line of a job's program in this pod.

    torchrun uses static rendezvous: rank 0 is pod 0, whose name is known in advance. It is not elastic, because a gang that
    loses a pod restarts as a whole from its last checkpoint.
    """
    program = [*die_with_parent(), sys.executable, "-m", f"recipes.{job.program}", str(job_file)]
    if pod.processes == 0:
        return [*program, *([str(pod.node_rank)] if pod.shares_work(job) else [])]
    return [
        *die_with_parent(),
        sys.executable,
        "-m",
        "recipes.torchrun",
        f"--nnodes={pod.num_nodes}",
        f"--nproc-per-node={pod.processes}",
        f"--node-rank={pod.node_rank}",
        "--rdzv-backend=static",
        f"--rdzv-id={job.program}-{job.id}",
        f"--rdzv-conf=timeout={RENDEZVOUS_SECONDS}",
        f"--master-addr={pod.first_host if pod.num_nodes > 1 else '127.0.0.1'}",
        f"--master-port={pod.rendezvous_port}",
        "--max-restarts=0",
        f"--shutdown-timeout={job.schedule.shutdown_seconds}",
        f"--log-dir={Path(job.work_dir) / RANK_LOGS}",
        f"--redirects={','.join(f'{rank}:1' for rank in range(1, pod.processes)) or '0'}",
        "--no-python",
        *program,
    ]


def die_with_parent() -> list[str]:
    """Return a command prefix that makes the kernel kill a process with its parent.

    Empty if the image lacks setpriv; the container still ends with the launcher.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig=KILL", "--"] if setpriv else []


def program_environment(variables: Mapping[str, str], attempt: int) -> dict[str, str]:
    """Add the attempt's number, which the API compares: it refuses commits of older attempts."""
    return {**variables, ATTEMPT_VARIABLE: str(attempt)}
