"""The last checkpoint of a run whose script registers `checkpoint/step-final` (rows S0, S8).

The specification's own script logs `checkpoint/step-1000`, `-2000` and so on, and then registers a name under which it
logged nothing: what it means is the last of them.
"""

import re
from collections.abc import Mapping, Sequence

from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.metadata.artifacts.file_hashes import ArtifactFiles

FINAL = re.compile(r"(.+/)?(step|checkpoint)-final")
AS_A_FOLDER, AS_KEYS = "checkpoint-final", "checkpoint/step-"
"""Row E4: the key `checkpoint/step-1000` is the place `checkpoint-1000`, so the one word means the other too."""


def logged_as(store: Store, records: ArtifactFiles, run_id: str, artifact: str) -> str | None:
    """The key of a run's artifact: its own, or that of the last checkpoint where it means that; None where it has none."""
    root = f"{uris.run_artifacts(run_id)}/"
    try:
        if store.exists(root + artifact):
            return artifact
    except BrokenArtifact:
        return None
    beginnings = meant_by(artifact)
    files = {place for beginning in beginnings for place in store.list((root + beginning).rpartition("/")[0])}
    uploads = {place.removeprefix(root): number for place, number in records.last_uploads(sorted(files)).items()}
    return newest(beginnings, uploads)


def meant_by(artifact: str) -> list[str]:
    """How the keys begin of which a word for the last checkpoint means the newest; nothing where it is no such word."""
    if not FINAL.fullmatch(artifact):
        return []
    return [artifact.removesuffix("final"), *([AS_KEYS] if artifact == AS_A_FOLDER else [])]


def newest(beginnings: Sequence[str], uploads: Mapping[str, int]) -> str | None:
    """The file or folder that begins so and came last.

    Args:
        uploads: each file of the run, with a number that grows with time: steps do not, where a script starts over.
    """
    last: dict[str, int] = {}
    for file, number in uploads.items():
        for beginning in beginnings:
            if file.startswith(beginning) and (name := file.removeprefix(beginning).partition("/")[0]):
                last[beginning + name] = max(number, last.get(beginning + name, 0))
    return max(last, key=lambda key: (last[key], key), default=None)
