"""What a run's job published, as files of the run: its result, its record, its weights, its checkpoints. They are read here,
and never written: an MLflow user looks for what was trained where his own files are.

A path is the key that `/v1/runs/{id}` tells (row E4). What lies in the store is `s3://hanzo-ml/checkpoints/{run}/STEP/FILE`
for `checkpoint/step-STEP/FILE`, else `s3://hanzo-ml/runs/{run}/PATH`.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from recipes.checkpoints.retention import parse_quality, rank_by_loss
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE, Store

UPLOADS_FOLDER = "artifacts"
"""The folder, beside what was published, of what was uploaded."""
REWIND_PATH = re.compile(r"checkpoint((?:/from-\d+)*)")
"""What came after the run was sent back to a step lies below `from-STEP` (`recipes.contracts.job`)."""
CHECKPOINT_PATH = re.compile(REWIND_PATH.pattern + r"/step-(\d+)((?:/.+)?)", re.DOTALL)


def published_uri(store: Store, run_id: str, path: str) -> str | None:
    """Where a file or folder lies that a job may have published; None for what it never did.

    Of a checkpoint that has no manifest, which is on its way or half deleted, nothing does.
    """
    if path.partition("/")[0] == UPLOADS_FOLDER or REWIND_PATH.fullmatch(path):
        return None
    found = CHECKPOINT_PATH.fullmatch(path)
    if found is None:
        return f"{uris.run_folder(run_id)}/{path}".rstrip("/")
    way, step, below = found.groups()
    place = f"{uris.run_checkpoints(run_id)}{way}/{step}"
    return place + below if has_manifest(store, place) else None


def published_folders(store: Store, run_id: str, folder: str) -> list[str] | None:
    """The names in a folder of checkpoints; None where `folder` is none."""
    found = REWIND_PATH.fullmatch(folder)
    if found is None:
        return None
    names = []
    for place in store.list_folder(f"{uris.run_checkpoints(run_id)}{found.group(1)}")[1]:
        name = place.rpartition("/")[2]
        if re.fullmatch(r"from-\d+", name):
            names.append(name)
        elif name.isdecimal() and has_manifest(store, place):
            names.append(f"step-{name}")
    return names


def has_manifest(store: Store, place: str) -> bool:
    try:
        store.size(f"{place}/{MANIFEST_FILE}")
    except FileNotFoundError:
        return False
    return True


def list_keys(store: Store, run_id: str) -> list[dict[str, Any]]:
    """Everything that a run has in the store, uploads among it, as the specification's {key, path} (row E4) and its size; an
    artifact with a manifest is one.
    """
    root = uris.run_folder(run_id)
    found = [
        (uri.removeprefix(f"{root}/").removeprefix(f"{UPLOADS_FOLDER}/"), uri, size)
        for uri, size in list_artifacts(store, root)
    ]
    found += kept_checkpoints(store, uris.run_checkpoints(run_id))
    return [{"key": key.rstrip("/"), "path": uri, "size": size} for key, uri, size in found]


def kept_checkpoints(store: Store, root: str) -> Iterator[tuple[str, str, int]]:
    """Those that training keeps, by their steps, and the best of them by a name of its own (row I7)."""
    places = [(uri.removeprefix(f"{root}/").rstrip("/").split("/"), uri, size) for uri, size in list_artifacts(store, root)]
    saved = sorted((int(step), way, uri, size) for (*way, step), uri, size in places if step.isdecimal())
    losses = {}
    for place, (_, _, uri, _) in enumerate(saved):
        with suppress(FileNotFoundError):  # retention took it meanwhile
            losses[place] = parse_quality(store.get_bytes(uri + MANIFEST_FILE)).loss
    named = [("/".join(["checkpoint", *way, f"step-{step}"]), uri, size) for step, way, uri, size in saved]
    yield from (named[place] for place in losses)
    for place in rank_by_loss(losses)[:1]:
        yield (f"best_model_step_{saved[place][0]}", *saved[place][2:])


def list_artifacts(store: Store, root: str) -> list[tuple[str, int]]:
    """Artifacts with a manifest, and files of none, by their names; with their sizes."""
    entries = store.entries(root)
    artifacts = {entry.uri.removesuffix(MANIFEST_FILE) for entry in entries if entry.uri.endswith("/" + MANIFEST_FILE)}
    sizes: dict[str, int] = {}
    for entry in entries:
        ends = (found.end() for found in re.finditer("/", entry.uri))
        place = next((folder for end in ends if (folder := entry.uri[:end]) in artifacts), entry.uri)
        sizes[place] = sizes.get(place, 0) + entry.size
    return sorted(sizes.items())
