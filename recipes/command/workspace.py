"""Prepare the command's folders and environment variables."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.command.folder_scan import FileStamp
from recipes.command.multi_node_publisher import restore_on_nodes
from recipes.command.nodes import NodeGroup
from recipes.command.snapshot_store import SnapshotStore, copy_artifact_files
from recipes.contracts.command_job import Script
from recipes.contracts.job import BadConfiguration, Job
from recipes.contracts.quantities import parse_duration, pluralize
from recipes.job_processes import JOB_ID_VARIABLE
from recipes.machine import read_machine
from recipes.runner import log_line
from recipes.storage.artifact_store import Store
from recipes.storage.folder_tree import code_index_uri, default_code_mode, read_times, write_tree
from recipes.storage.manifest import Artifact

# What the command finds on this machine: its source files, its dataset, and its checkpoints, restored if the job moved.


@dataclass(frozen=True)
class Folders:
    """The folders that the command finds on this machine."""

    code: Path
    checkpoints: Path
    dataset: Path | None
    borrowed: Mapping[str, FileStamp]
    """The checkpoint files that belong to other nodes."""


def prepare_folders(job: Job, store: Store, states: SnapshotStore, work: Path, nodes: NodeGroup) -> Folders:
    """Prepare the folders. Source files are written again.

    Other files that the command left there are kept.
    """
    cache = Path(job.cache_dir)
    code, checkpoints = work / "code", work / "checkpoints"
    for folder in (code, checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    if source := job.inputs.get("code"):
        restore_code(store, source, cache, code)
    borrowed = restore_checkpoints(states, cache, checkpoints, nodes)
    requested, dataset = job.parameters.get("dataset"), job.inputs.get("dataset")
    if requested and dataset is None:
        raise BadConfiguration(
            f"storage.datasets names dataset {requested}, which does not exist: see `hanzo-ml dataset list`"
        )
    dataset_folder = copy_dataset(store, dataset, cache, work / "dataset") if dataset else None
    return Folders(code, checkpoints, dataset_folder, borrowed)


def restore_code(store: Store, source: Artifact, cache: Path, code: Path) -> None:
    """Write the source files as they were submitted, including modes, times, links and empty folders."""
    fetched, manifest = store.fetch(source, cache), store.manifest(source)
    write_tree(
        code,
        {file.path: file for file in manifest.files},
        lambda path: fetched / path,
        folders=manifest.folders,
        links=manifest.links,
        times=read_times(store, code_index_uri(source.uri)),
        default_mode=lambda path: default_code_mode(path.read_bytes()),
    )


def restore_checkpoints(states: SnapshotStore, cache: Path, checkpoints: Path, nodes: NodeGroup) -> Mapping[str, FileStamp]:
    """Restore what an earlier attempt published, if this machine has no checkpoints.

    The job has moved here. With several nodes, each restores its part of one snapshot. Returns the files that belong to
    other nodes.
    """
    if nodes.size > 1:
        return restore_on_nodes(states, nodes, cache, checkpoints)
    if not any(checkpoints.iterdir()) and (kept := states.restore_newest(cache, checkpoints)):
        log_line(f"checkpoints: {pluralize(kept.size_bytes, 'byte')} restored from {kept.uri}")
    return {}


def copy_dataset(store: Store, dataset: Artifact, cache: Path, target: Path) -> Path:
    """Copy the dataset if its folder is the store's own: a script may write anywhere."""
    folder = store.fetch(dataset, cache)
    if folder != store.local_path(dataset.uri):
        return folder
    copy_artifact_files(
        store, dataset, folder, target
    )  # other files may be there too, such as the tokens of a prepared version's splits
    return target


# The environment variables of a command, and the GPUs and programs that it finds through them.

CPU_FALLBACK_FOLDER = Path(__file__).parent / "without_gpu"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
STORE_KEYS = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"})
NO_GPU = ("", "-1")
"""Values that a command may set instead of the job's GPUs."""


def build_environment(
    job: Job, script: Script, folders: Folders, inherited: Mapping[str, str], *, has_gpus: bool
) -> dict[str, str]:
    """Return the variables of the command: those it sets itself, overridden by the job's."""
    assert job.tracking is not None
    # This program moves the command's data: the command needs no key of a store that this one signs in to.
    keys = STORE_KEYS if job.store.root.startswith(("http://", "https://")) else frozenset()
    kept = {name: value for name, value in inherited.items() if name not in keys}
    env = {**kept, "PYTHONUNBUFFERED": "1", **script.env}
    if VISIBLE_GPUS in inherited and env[VISIBLE_GPUS] not in NO_GPU:  # other GPUs belong to other jobs
        env[VISIBLE_GPUS] = inherited[VISIBLE_GPUS]
    env |= {
        "HANZO_ML_TRACKING_URI": job.tracking.uri,
        "MLFLOW_TRACKING_URI": job.tracking.uri,
        "HANZO_ML_EXPERIMENT": str(job.parameters["experiment"]),
        "HANZO_ML_RUN_ID": job.tracking.run_id,
        "MLFLOW_RUN_ID": job.tracking.run_id,
        "HANZO_ML_CHECKPOINTS": str(folders.checkpoints),
        "HANZO_ML_CHECKPOINT_INTERVAL": f"{parse_duration(job.checkpoint.interval):.0f}",
        JOB_ID_VARIABLE: job.id,
    }
    if folders.dataset is not None:
        env["HANZO_ML_DATASETS"] = str(folders.dataset)
    env["PATH"] = join_paths(str(Path(sys.executable).parent), env.get("PATH", os.defpath))
    sees_gpus = has_gpus and env.get(VISIBLE_GPUS) not in NO_GPU
    env["PYTHONPATH"] = join_paths("" if sees_gpus else str(CPU_FALLBACK_FOLDER), env.get("PYTHONPATH", ""))
    return env


def count_visible_gpus(visible: str | None) -> int:
    """Return the number of GPUs of the job, which are those in its environment."""
    if visible is None:
        return len(read_machine().gpus)
    return 0 if visible in NO_GPU else len(visible.split(","))


def join_paths(first: str, rest: str) -> str:
    return os.pathsep.join(filter(None, (first, rest)))


def check_program_exists(program: str, folder: Path, path: str) -> None:
    """Raise BadConfiguration if a command's first word names no executable program."""
    program_path = str(folder / program) if "/" in program else program
    if shutil.which(program_path, path=path) is None:
        raise BadConfiguration(f"program '{program}' was not found: correct `command`, or install it next to Hanzo ML")
