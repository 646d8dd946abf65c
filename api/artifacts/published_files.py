"""Show what a run's job published as read-only files of the run.

Its result, record, weights and checkpoints appear next to uploaded files, where MLflow users look for them.

A path is the key that `/v1/runs/{id}` returns. `checkpoint/step-STEP/FILE` is stored at
`s3://hanzo-ml/checkpoints/{run}/STEP/FILE`, any other PATH at `s3://hanzo-ml/runs/{run}/PATH`.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from recipes.checkpoints.retention import parse_quality, rank_by_loss
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE, Store

UPLOADS_FOLDER = "artifacts"
"""The folder of uploaded files, among the published ones."""
REWIND_PATH = re.compile(r"checkpoint((?:/from-\d+)*)")
"""After a rewind to a step, new checkpoints are stored below `from-STEP` (`recipes.contracts.job`)."""
CHECKPOINT_PATH = re.compile(REWIND_PATH.pattern + r"/step-(\d+)((?:/.+)?)", re.DOTALL)


def published_uri(store: Store, run_id: str, path: str) -> str | None:
    """Return the URI of what a job may have published at `path`, else None.

    None also within a checkpoint without a manifest, which is incomplete or half deleted.
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
    """List the names in a folder of checkpoints; None if `folder` is not one."""
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
    """List all stored objects of a run as {key, path, size}.

    Uploads are included; an artifact with a manifest is one entry.
    """
    root = uris.run_folder(run_id)
    found = [
        (uri.removeprefix(f"{root}/").removeprefix(f"{UPLOADS_FOLDER}/"), uri, size)
        for uri, size in list_artifacts(store, root)
    ]
    found += kept_checkpoints(store, uris.run_checkpoints(run_id))
    return [{"key": key.rstrip("/"), "path": uri, "size": size} for key, uri, size in found]


def kept_checkpoints(store: Store, root: str) -> Iterator[tuple[str, str, int]]:
    """Yield the retained checkpoints by step, then the best one under its own name."""
    places = [(uri.removeprefix(f"{root}/").rstrip("/").split("/"), uri, size) for uri, size in list_artifacts(store, root)]
    saved = sorted((int(step), way, uri, size) for (*way, step), uri, size in places if step.isdecimal())
    losses = {}
    for place, (_, _, uri, _) in enumerate(saved):
        with suppress(FileNotFoundError):  # deleted by retention meanwhile
            losses[place] = parse_quality(store.get_bytes(uri + MANIFEST_FILE)).loss
    named = [("/".join(["checkpoint", *way, f"step-{step}"]), uri, size) for step, way, uri, size in saved]
    yield from (named[place] for place in losses)
    for place in rank_by_loss(losses)[:1]:
        yield (f"best_model_step_{saved[place][0]}", *saved[place][2:])


def list_artifacts(store: Store, root: str) -> list[tuple[str, int]]:
    """List artifacts with a manifest, and files outside of any, by name, with their sizes."""
    entries = store.entries(root)
    artifacts = {entry.uri.removesuffix(MANIFEST_FILE) for entry in entries if entry.uri.endswith("/" + MANIFEST_FILE)}
    sizes: dict[str, int] = {}
    for entry in entries:
        ends = (found.end() for found in re.finditer("/", entry.uri))
        place = next((folder for end in ends if (folder := entry.uri[:end]) in artifacts), entry.uri)
        sizes[place] = sizes.get(place, 0) + entry.size
    return sorted(sizes.items())
