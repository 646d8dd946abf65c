"""How a program is started on this machine: its command, alone or under torchrun, and the variables that it finds."""

import sys
from pathlib import Path

from recipes.schema import Job, Program
from resources.compute.base import SHUTDOWN_SECONDS

ENVIRONMENT = {
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that spin while they wait lose most of their time on a machine that does other work too; those that sleep at
    # once are woken thousands of times a second: 49,000 changes of thread against 5,000, and a tenth of a step.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
}
TOGETHER = {
    # All processes of a job are on this machine, whose own name may lead nowhere.
    "GLOO_SOCKET_IFNAME": "lo",
    # What torchrun sets itself, with four lines about it in the log; the program gives each process its threads.
    "OMP_NUM_THREADS": "1",
}
"""Besides, of a job in several processes."""
OF_A_COMMAND = {
    "GLOO_SOCKET_IFNAME": "lo",
    # A torchrun without a word about it would meet on port 29500, and there with every other one of this machine.
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "127.0.0.1:0",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "PET_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
}
"""Instead of both, for a command of the user's own: what its libraries print and fetch is his business."""
PROCESSES = "processes"
"""Where torchrun puts what all processes but the first print."""


def surroundings(job: Job) -> dict[str, str]:
    if job.program is Program.COMMAND:
        shape = {"PET_NPROC_PER_NODE": str(job.distributed.gpus_per_node)} if job.distributed else {}
        return {**OF_A_COMMAND, **shape}
    return {**ENVIRONMENT, **TOGETHER} if needs_torchrun(job) else ENVIRONMENT


def needs_torchrun(job: Job) -> bool:
    """Whether it is several processes, or a shard's one: the checkpoints of what is sharded are of another form.

    A command of the user's own starts its processes itself.
    """
    shape = job.distributed
    return job.program is not Program.COMMAND and shape is not None and (shape.gpus_per_node > 1 or shape.strategy != "ddp")


def command(job: Job, job_file: Path) -> list[str]:
    """The program itself, or torchrun with its processes, of which the first alone has the log for its lines of progress.

    Faults of all are in the log. None of them outlives torchrun: with it goes the lock, and the job may start anew.
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
        f"--log-dir={Path(job.work_dir) / PROCESSES}",
        f"--redirects={','.join(f'{rank}:1' for rank in range(1, shape.gpus_per_node)) or '0'}",
        "--no-python",
        *("setpriv", "--pdeathsig=KILL", sys.executable),
        *program,
    ]
