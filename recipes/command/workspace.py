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

# What the command finds on this machine: its source files, its dataset, its checkpoints, brought back where it moved.


@dataclass(frozen=True)
class Folders:
    """What the command finds on this machine."""

    code: Path
    checkpoints: Path
    dataset: Path | None
    borrowed: Mapping[str, FileStamp]
    """What of the checkpoints is other nodes'."""


def prepare_folders(job: Job, store: Store, states: SnapshotStore, work: Path, nodes: NodeGroup) -> Folders:
    """The folders, with the source files written anew: whatever else the command left there stays."""
    cache = Path(job.cache_dir)
    code, checkpoints = work / "code", work / "checkpoints"
    for folder in (code, checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    if source := job.inputs.get("code"):
        restore_code(store, source, cache, code)
    borrowed = restore_checkpoints(states, cache, checkpoints, nodes)
    requested, dataset = job.parameters.get("dataset"), job.inputs.get("dataset")
    if requested and dataset is None:
        raise BadConfiguration(f"there is no dataset {requested}, which storage.datasets names: see `hanzo-ml dataset list`")
    dataset_folder = copy_dataset(store, dataset, cache, work / "dataset") if dataset else None
    return Folders(code, checkpoints, dataset_folder, borrowed)


def restore_code(store: Store, source: Artifact, cache: Path, code: Path) -> None:
    """Write the source files as they were submitted: modes, times, links and empty folders too."""
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
    """What an earlier attempt published, where this machine has nothing that the command left: the job has moved here.

    Of several nodes each has its part of one state. Returns what of it is others'.
    """
    if nodes.size > 1:
        return restore_on_nodes(states, nodes, cache, checkpoints)
    if not any(checkpoints.iterdir()) and (kept := states.restore_newest(cache, checkpoints)):
        log_line(f"checkpoints: {pluralize(kept.size_bytes, 'byte')} brought back from {kept.uri}")
    return {}


def copy_dataset(store: Store, dataset: Artifact, cache: Path, target: Path) -> Path:
    """The dataset as a folder that is not the store's own: a script writes where it likes."""
    folder = store.fetch(dataset, cache)
    if folder != store.local_path(dataset.uri):
        return folder
    copy_artifact_files(
        store, dataset, folder, target
    )  # others may lie there too: a prepared version's splits have their tokens
    return target


# The variables of a command's environment, and the GPUs and programs that it finds by them.

CPU_FALLBACK_FOLDER = Path(__file__).parent / "without_gpu"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
STORE_KEYS = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"})
NO_GPU = ("", "-1")
"""What a command may say of it in place of the GPUs that its job has."""


def build_environment(
    job: Job, script: Script, folders: Folders, inherited: Mapping[str, str], *, has_gpus: bool
) -> dict[str, str]:
    """The variables of the command: what it gives itself, below what the job knows better."""
    assert job.tracking is not None
    # This program moves the command's data: the command needs no key of a store that this one signs in to.
    keys = STORE_KEYS if job.store.root.startswith(("http://", "https://")) else frozenset()
    kept = {name: value for name, value in inherited.items() if name not in keys}
    env = {**kept, "PYTHONUNBUFFERED": "1", **script.env}
    if VISIBLE_GPUS in inherited and env[VISIBLE_GPUS] not in NO_GPU:  # others are other jobs'
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
    """How many there are for the job, which has those that its environment names."""
    if visible is None:
        return len(read_machine().gpus)
    return 0 if visible in NO_GPU else len(visible.split(","))


def join_paths(first: str, rest: str) -> str:
    return os.pathsep.join(filter(None, (first, rest)))


def check_program_exists(program: str, folder: Path, path: str) -> None:
    """Raises BadConfiguration where a command's first word names nothing that can be run."""
    program_path = str(folder / program) if "/" in program else program
    if shutil.which(program_path, path=path) is None:
        raise BadConfiguration(f"there is no program '{program}' here: correct `command`, or install it beside Hanzo ML")
