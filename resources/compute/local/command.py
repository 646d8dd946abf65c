"""Command line and environment of a job's program on this machine, alone or under torchrun."""

import sys
from pathlib import Path

from recipes.contracts.job import Job, Program
from resources.compute.base import PROGRAM_ENVIRONMENT, SHUTDOWN_SECONDS

MULTI_PROCESS_ENVIRONMENT = {
    # All processes of a job are on this machine, whose host name may not resolve.
    "GLOO_SOCKET_IFNAME": "lo",
    # torchrun sets this too, but prints a four-line warning; the program sets the thread count of each process.
    "OMP_NUM_THREADS": "1",
}
"""In addition to `PROGRAM_ENVIRONMENT`, for jobs of several processes."""
COMMAND_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    # torchrun's default port 29500 would collide between jobs on this machine.
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "127.0.0.1:0",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "PET_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
}
"""Replaces both for a user's own command: what its libraries print and download is up to the user."""
RANK_LOGS = "processes"
"""Folder for the output of all ranks but the first, written by torchrun."""


def environment(job: Job) -> dict[str, str]:
    """Return the environment variables of a job's program."""
    if job.program is Program.COMMAND:
        shape = {"PET_NPROC_PER_NODE": str(job.distributed.gpus_per_node)} if job.distributed else {}
        return {**COMMAND_ENVIRONMENT, **shape}
    return {**PROGRAM_ENVIRONMENT, **(MULTI_PROCESS_ENVIRONMENT if needs_torchrun(job) else {}), **job.env}


def needs_torchrun(job: Job) -> bool:
    """Return whether the program runs under torchrun.

    It does with several processes, and when sharded, because the checkpoint format differs. A user's own command starts its
    processes itself.
    """
    shape = job.distributed
    return job.program is not Program.COMMAND and shape is not None and (shape.gpus_per_node > 1 or shape.strategy != "ddp")


def command(job: Job, job_file: Path) -> list[str]:
    """Return the command line of a job's program, under torchrun if needed.

    Only the first rank writes progress to the log, but errors of all ranks are in it. No rank outlives torchrun, which holds
    the job's lock: once torchrun is gone, the job can be restarted.
    """
    program = ["-m", f"recipes.{job.program}", str(job_file)]
    shape = job.distributed
    if shape is None or not needs_torchrun(job):
        return [sys.executable, *program]
    return [
        sys.executable,
        "-m",
        "recipes.torchrun",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={shape.gpus_per_node}",
        "--max-restarts=0",
        f"--shutdown-timeout={SHUTDOWN_SECONDS}",
        f"--log-dir={job_file.parent / RANK_LOGS}",
        f"--redirects={','.join(f'{rank}:1' for rank in range(1, shape.gpus_per_node)) or '0'}",
        "--no-python",
        *("setpriv", "--pdeathsig=KILL", sys.executable),
        *program,
    ]
