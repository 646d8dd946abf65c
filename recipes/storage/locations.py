"""Map logical URIs and chunk hashes to buckets and keys."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from recipes.contracts.job import StoreAddress
from recipes.storage import uris

# Location of logical URIs: the specification's `s3://hanzo-ml/<kind>/...` and `s3://hanzo-models/...`.
#
# Names only; bytes are in `recipes.storage.object_store`.

KIND_BUCKETS = {
    "datasets": "datasets",
    "checkpoints": "checkpoints",
    "runs": "checkpoints",
    "artifacts": "checkpoints",
    "jobs": "checkpoints",
}
API_SCHEMES = ("api+http://", "api+https://")
FORBIDDEN_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Characters that object names cannot hold: control characters (a rule of obstore), and surrogates, which UTF-8 lacks."""


class BrokenArtifact(Exception):
    """Stored bytes differ from their manifest or hash."""


@dataclass(frozen=True)
class Location:
    bucket: str
    key: str


def resolve_uri(address: StoreAddress, uri: str) -> Location:
    """Return bucket and key of a logical URI.

    Raises:
        BrokenArtifact: it is no URI of this store.
    """
    scheme, _, rest = uri.partition("://")
    logical, _, key = rest.partition("/")
    key = key.strip("/")
    # Not urlparse: it drops newlines and interprets `#`, `?` and `%` in names.
    if (
        scheme != "s3"
        or not logical
        or any(part in ("", ".", "..") or FORBIDDEN_CHARACTERS.search(part) for part in key.split("/"))
    ):
        raise BrokenArtifact(f"not a URI of this store: {uri!r}")
    if logical == uris.PRODUCT_BUCKET:
        kind = key.split("/")[0]
        if kind not in KIND_BUCKETS:
            raise BrokenArtifact(f"{uri}: '{kind}' is none of {', '.join(KIND_BUCKETS)}")
        return Location(address.buckets[KIND_BUCKETS[kind]], key)
    if logical == uris.MODELS_BUCKET:
        return Location(address.buckets["models"], key)
    raise BrokenArtifact(f"{uri}: unknown logical bucket '{logical}' ({' and '.join(uris.BUCKETS)} exist)")


def is_api_address(address: StoreAddress) -> bool:
    """Return whether objects are accessed through the API, as in job pods."""
    return address.root.startswith(API_SCHEMES)


def local_store_root(address: StoreAddress) -> Path | None:
    """Return the folder that holds the buckets in embedded mode, or None for S3."""
    root = urlparse(address.root)
    return Path(unquote(root.path)) if root.scheme == "file" else None


def refuse_symlinks(folder: Path, key: str, uri: str) -> None:
    """Reject symbolic links in a store folder, which could lead outside of it.

    Raises:
        BrokenArtifact: a part of the key is a symbolic link.
    """
    place = folder
    for part in key.split("/"):
        place = place / part
        if place.is_symlink():
            raise BrokenArtifact(f"{uri}: a part of it is a symbolic link, which the store does not allow")


# Chunks are stored per organization under their own hash, shared by all versions of its datasets.
#
# They are not shared between organizations: the existence of a chunk would reveal what another organization stores.

CHUNKS_FOLDER = "_chunks"
"""Starts with an underscore, as no dataset name or organization folder does."""


def chunk_folder(uri: str) -> str:
    """Return the chunk folder of the organization that the dataset URI belongs to.

    Raises:
        BrokenArtifact: it is no dataset URI; only datasets have chunks.
    """
    if not uri.startswith(f"{uris.DATASETS}/"):
        raise BrokenArtifact(f"{uri} has chunks, and only datasets have")
    first = uri.removeprefix(f"{uris.DATASETS}/").partition("/")[0]
    organization = f"/{first}" if first.startswith("@") else ""
    return f"{uris.DATASETS}{organization}/{CHUNKS_FOLDER}"


def chunk_uri(uri: str, sha256: str) -> str:
    """Return the URI of a chunk of a file below `uri`."""
    return f"{chunk_folder(uri)}/{sha256[:2]}/{sha256}"


def parse_chunk_hash(uri: str) -> str | None:
    """Return the SHA-256 in a chunk's URI, or None for other URIs."""
    found = re.fullmatch(rf"{uris.DATASETS}/(?:@[^/]+/)?{CHUNKS_FOLDER}/[0-9a-f]{{2}}/([0-9a-f]{{64}})", uri)
    return found[1] if found else None
