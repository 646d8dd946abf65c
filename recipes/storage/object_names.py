"""Which files of an artifact cannot have an object of their own name, and where those lie instead."""

import re

from recipes.storage.buckets import UNFINISHED_UPLOAD
from recipes.storage.checksums import MANIFEST_FILE
from recipes.storage.locations import FORBIDDEN_CHARACTERS

OBJECTS_FOLDER = ".objects"
"""In the artifact's folder: files by their SHA-256."""
COMMITTED_NAMES = ("exit.json", "usage.json", "unsent_metrics.jsonl")
"""Names that pods write through the API only (`resources.object_store.program_scope`), and therefore only small files."""
MAX_COMMITTED_BYTES = 1 << 20
"""`recipes.storage.signed_upload.COMMIT_BYTES`, whose module only pods load."""
MAX_PATH_BYTES = 700
"""Of a path in the artifact. A key of S3 has 1,024, with the artifact's own place."""


def object_name(path: str, sha256: str, size: int) -> str:
    """The name of a file's object where it cannot be its path; empty where it can."""
    return "" if has_plain_name(path, size) else f"{OBJECTS_FOLDER}/{sha256}"


def has_plain_name(path: str, size: int) -> bool:
    """Whether a store keeps an object of this path, and reads nothing into its name."""
    parts = path.split("/")
    return not (
        parts[-1] == MANIFEST_FILE
        or (parts[-1] in COMMITTED_NAMES and size > MAX_COMMITTED_BYTES)
        or parts[0] == OBJECTS_FOLDER
        or any(UNFINISHED_UPLOAD.fullmatch(part) or re.search(FORBIDDEN_CHARACTERS, part) for part in parts)
        or len(path.encode()) > MAX_PATH_BYTES
    )
