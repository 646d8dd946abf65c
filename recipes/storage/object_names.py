"""Object names for files of an artifact that cannot be stored under their path."""

import re

from recipes.storage.buckets import UNFINISHED_UPLOAD
from recipes.storage.checksums import MANIFEST_FILE
from recipes.storage.locations import FORBIDDEN_CHARACTERS

OBJECTS_FOLDER = ".objects"
"""Folder in the artifact for files by SHA-256."""
COMMITTED_NAMES = ("exit.json", "usage.json", "unsent_metrics.jsonl")
"""Names that pods write only through the API (`resources.object_store.program_scope`), which limits their size."""
MAX_COMMITTED_BYTES = 1 << 20
"""Equal to `recipes.storage.signed_upload.COMMIT_BYTES`, whose module is loaded in pods only."""
MAX_PATH_BYTES = 700
"""Maximum length of a path in an artifact: S3 keys have 1,024 bytes including the artifact's location."""


def object_name(path: str, sha256: str, size: int) -> str:
    """Return the object's name of a file, empty if it is the file's path."""
    return "" if has_plain_name(path, size) else f"{OBJECTS_FOLDER}/{sha256}"


def has_plain_name(path: str, size: int) -> bool:
    """Return whether a path can be an object's name without a special meaning."""
    parts = path.split("/")
    return not (
        parts[-1] == MANIFEST_FILE
        or (parts[-1] in COMMITTED_NAMES and size > MAX_COMMITTED_BYTES)
        or parts[0] == OBJECTS_FOLDER
        or any(UNFINISHED_UPLOAD.fullmatch(part) or re.search(FORBIDDEN_CHARACTERS, part) for part in parts)
        or len(path.encode()) > MAX_PATH_BYTES
    )
