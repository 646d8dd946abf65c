"""The variables of a command's environment, and the GPUs and programs that it finds by them."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from recipes.command.folders import Folders
from recipes.contracts.command_job import Script
from recipes.contracts.job import BadConfiguration, Job
from recipes.contracts.quantities import seconds_of
from recipes.job_processes import MARK
from recipes.machine import read_machine

WITHOUT_GPU = Path(__file__).parent / "without_gpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = ("", "-1")
"""What a command may say of it in place of the GPUs that its job has."""


def environment(
    job: Job, script: Script, folders: Folders, inherited: Mapping[str, str], *, has_gpus: bool
) -> dict[str, str]:
    """The variables of the command: what it gives itself, below what the job knows better."""
    assert job.tracking is not None
    env = {**inherited, "PYTHONUNBUFFERED": "1", **script.env}
    if VISIBLE in inherited and env[VISIBLE] not in NO_GPU:  # others are other jobs'
        env[VISIBLE] = inherited[VISIBLE]
    env |= {
        "HANZO_ML_TRACKING_URI": job.tracking.uri,
        "MLFLOW_TRACKING_URI": job.tracking.uri,
        "HANZO_ML_EXPERIMENT": str(job.parameters["experiment"]),
        "HANZO_ML_RUN_ID": job.tracking.run_id,
        "MLFLOW_RUN_ID": job.tracking.run_id,
        "HANZO_ML_CHECKPOINTS": str(folders.checkpoints),
        "HANZO_ML_CHECKPOINT_INTERVAL": f"{seconds_of(job.checkpoint.interval):.0f}",
        MARK: job.id,
    }
    if folders.dataset is not None:
        env["HANZO_ML_DATASETS"] = str(folders.dataset)
    env["PATH"] = joined(str(Path(sys.executable).parent), env.get("PATH", os.defpath))
    sees_gpus = has_gpus and env.get(VISIBLE) not in NO_GPU
    env["PYTHONPATH"] = joined("" if sees_gpus else str(WITHOUT_GPU), env.get("PYTHONPATH", ""))
    return env


def gpus_here(visible: str | None) -> int:
    """How many there are for the job, which has those that its environment names."""
    if visible is None:
        return len(read_machine().gpus)
    return 0 if visible in NO_GPU else len(visible.split(","))


def joined(first: str, rest: str) -> str:
    return os.pathsep.join(filter(None, (first, rest)))


def check_is_there(program: str, folder: Path, path: str) -> None:
    """Raises BadConfiguration where a command's first word names nothing that can be run."""
    place = str(folder / program) if "/" in program else program
    if shutil.which(place, path=path) is None:
        raise BadConfiguration(f"there is no program '{program}' here: correct `command`, or install it beside Hanzo ML")
