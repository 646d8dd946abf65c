"""What of a state is which node's, of a command that runs on several: the first's files lie where they lay in its folder,
so that they are found as those of a single one are, and those of node 1 below `.nodes/1`: deeper than any like them.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from recipes.command.look import Stamp, look_at
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, FileRecord, Manifest

NODES = "nodes"
"""The fact of a state that says how many nodes have a part in it. One that was made before there were parts says none."""
FOLDER = ".nodes"


def prefix_of(rank: int) -> str:
    return f"{FOLDER}/{rank}/" if rank else ""


def is_taken(path: str) -> bool:
    """Whether a file of the first node's own lies where another node's part does."""
    return path.startswith(f"{FOLDER}/")


def whole_of(parts: Sequence[Manifest], made_of: Manifest) -> Manifest:
    """The state that these are the parts of, by rank."""
    files = [
        file.model_copy(update={"path": f"{prefix_of(rank)}{file.path}"})
        for rank, part in enumerate(parts)
        for file in part.files
    ]
    ordered = tuple(sorted(files, key=lambda file: PurePosixPath(file.path)))
    return made_of.model_copy(update={"files": ordered, "facts": {**made_of.facts, NODES: len(parts)}})


def owner_of(path: str, whole: Manifest) -> tuple[int, str]:
    """Whose a file of a state is, and where it lay there."""
    if NODES not in whole.facts or not is_taken(path):
        return 0, path
    _, rank, own = path.split("/", 2)
    return int(rank), own


def files_for(rank: int, whole: Manifest) -> dict[str, tuple[int, FileRecord]]:
    """What a node begins with, by the path in its folder: whose it is, and the file.

    Its own, and what others have at paths that it has not, the first before all: as if they had shared a folder. A script
    whose first process saves for all looks for that on each node; and of a tensor that all have alike
    `torch.distributed.checkpoint` writes one copy, into any process's file, where each process looks for it.
    """
    files = [(*owner_of(file.path, whole), file) for file in whole.files]
    found: dict[str, tuple[int, FileRecord]] = {}
    folders: set[str] = set()
    for owner, path, file in sorted(files, key=lambda each: (each[0] != rank, each[0])):
        above = {parent.as_posix() for parent in PurePosixPath(path).parents}
        if path not in found and path not in folders and not above & found.keys():
            found[path] = owner, file
            folders |= above
    return found


def bring_part(store: Store, state: Artifact, rank: int, cache: Path, target: Path) -> Mapping[str, Stamp]:
    """Make `target` what a node begins with; return what of it is others', and no part of this node's own state.

    Raises:
        BrokenArtifact: a file of it is missing, or is not the one that was published.
    """
    wanted = files_for(rank, store.manifest(state))
    fetched = store.fetch(state, cache, only=[file.path for _, file in wanted.values()])
    scratch = target.with_name(f".{target.name}.tmp")  # so that a kill leaves no half of it for the command
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for path, (_, file) in wanted.items():
        (scratch / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(fetched / file.path, scratch / path)
    shutil.rmtree(target, ignore_errors=True)
    scratch.replace(target)
    borrowed = (path for path, (owner, _) in wanted.items() if owner != rank)
    return {path: stamp for path in borrowed if (stamp := look_at(target / path))}
