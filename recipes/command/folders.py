"""What the command finds on this machine: its source files, its dataset, its checkpoints, brought back where it moved."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.command.look import Stamp
from recipes.command.multi_node_publisher import begin_together
from recipes.command.nodes import Nodes
from recipes.command.snapshot_store import States, copy_files
from recipes.contracts.job import BadConfiguration, Job
from recipes.counted import counted
from recipes.runner import say
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact


@dataclass(frozen=True)
class Folders:
    """What the command finds on this machine."""

    code: Path
    checkpoints: Path
    dataset: Path | None
    borrowed: Mapping[str, Stamp]
    """What of the checkpoints is other nodes'."""


def make_folders(job: Job, store: Store, states: States, work: Path, nodes: Nodes) -> Folders:
    """The folders, with the source files written anew: whatever else the command left there stays."""
    cache = Path(job.cache_dir)
    code, checkpoints = work / "code", work / "checkpoints"
    for folder in (code, checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    if source := job.inputs.get("code"):
        fetched = store.fetch(source, cache)
        for record in store.manifest(source).files:
            target = code / record.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(fetched / record.path, target)
            if target.read_bytes().startswith(b"#!"):
                target.chmod(0o755)
    borrowed = bring_back(states, cache, checkpoints, nodes)
    asked, dataset = job.parameters.get("dataset"), job.inputs.get("dataset")
    if asked and dataset is None:
        raise BadConfiguration(f"there is no dataset {asked}, which storage.datasets names: see `hanzo-ml dataset list`")
    own = own_copy(store, dataset, cache, work / "dataset") if dataset else None
    return Folders(code, checkpoints, own, borrowed)


def bring_back(states: States, cache: Path, checkpoints: Path, nodes: Nodes) -> Mapping[str, Stamp]:
    """What an earlier attempt published, where this machine has nothing that the command left: the job has moved here.

    Of several nodes each has its part of one state. Returns what of it is others'.
    """
    if nodes.size > 1:
        return begin_together(states, nodes, cache, checkpoints)
    if not any(checkpoints.iterdir()) and (kept := states.bring(cache, checkpoints)):
        say(f"checkpoints: {counted(kept.size_bytes, 'byte')} brought back from {kept.uri}")
    return {}


def own_copy(store: Store, dataset: Artifact, cache: Path, target: Path) -> Path:
    """The dataset as a folder that is not the store's own: a script writes where it likes."""
    folder = store.fetch(dataset, cache)
    if folder != store.local_path(dataset.uri):
        return folder
    copy_files(store, dataset, folder, target)  # others may lie there too: a prepared version's splits have their tokens
    return target
