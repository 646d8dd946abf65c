"""Map logical URIs and chunk hashes to buckets and keys."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from recipes.contracts.job import StoreAddress
from recipes.storage import uris

# Where a logical URI lies: the specification's `s3://hanzo-ml/<kind>/...` and `s3://hanzo-models/...` (checklist Z8).
#
# What belongs here: names, and which of them there can be. What does not: bytes (`recipes.storage.object_store`).

KIND_BUCKETS = {
    "datasets": "datasets",
    "checkpoints": "checkpoints",
    "runs": "checkpoints",
    "artifacts": "checkpoints",
    "jobs": "checkpoints",
}
API_SCHEMES = ("api+http://", "api+https://")
FORBIDDEN_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""What no object's name can hold: control characters (a rule of obstore), and halves of characters, which no UTF-8 has."""


class BrokenArtifact(Exception):
    """Bytes in the store are not what their manifest or their name says."""


@dataclass(frozen=True)
class Location:
    bucket: str
    key: str


def resolve_uri(address: StoreAddress, uri: str) -> Location:
    """The bucket and key of a logical URI.

    Raises:
        BrokenArtifact: it is no URI of this store.
    """
    scheme, _, rest = uri.partition("://")
    logical, _, key = rest.partition("/")
    key = key.strip("/")
    # Not urlparse: it drops newlines, and takes `#`, `?` and `%` in a name for syntax.
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
    """Whether objects are reached through the API, as a job's pods reach them."""
    return address.root.startswith(API_SCHEMES)


def local_store_root(address: StoreAddress) -> Path | None:
    """The folder that holds the buckets in embedded mode; None where they are on an S3 server."""
    root = urlparse(address.root)
    return Path(unquote(root.path)) if root.scheme == "file" else None


def refuse_symlinks(folder: Path, key: str, uri: str) -> None:
    """In a folder, a symbolic link would be a way out of it: whatever lies behind one is not in the store.

    Raises:
        BrokenArtifact: a part of the key is a symbolic link.
    """
    place = folder
    for part in key.split("/"):
        place = place / part
        if place.is_symlink():
            raise BrokenArtifact(f"{uri}: a part of it is a symbolic link, and the store holds none")


# Where the chunks of files lie: below the datasets of one organization, each under its own hash, so once for all
# versions.
#
# Not for all organizations: whoever could ask whether a chunk is there would learn what others have.

CHUNKS_FOLDER = "_chunks"
"""No dataset's name and no organization's folder begins with an underscore."""


def chunk_folder(uri: str) -> str:
    """The folder of all chunks of the organization whose datasets `uri` is below.

    Raises:
        BrokenArtifact: nothing there has chunks.
    """
    if not uri.startswith(f"{uris.DATASETS}/"):
        raise BrokenArtifact(f"{uri} has chunks, and only datasets have")
    first = uri.removeprefix(f"{uris.DATASETS}/").partition("/")[0]
    organization = f"/{first}" if first.startswith("@") else ""
    return f"{uris.DATASETS}{organization}/{CHUNKS_FOLDER}"


def chunk_uri(uri: str, sha256: str) -> str:
    """Where a chunk of a file below `uri` lies."""
    return f"{chunk_folder(uri)}/{sha256[:2]}/{sha256}"


def parse_chunk_hash(uri: str) -> str | None:
    """The SHA-256 that a chunk says itself; None of what is no chunk."""
    found = re.fullmatch(rf"{uris.DATASETS}/(?:@[^/]+/)?{CHUNKS_FOLDER}/[0-9a-f]{{2}}/([0-9a-f]{{64}})", uri)
    return found[1] if found else None
