"""Where a logical URI lies: the specification's `s3://hanzo-ml/<kind>/...` and `s3://hanzo-models/...` (checklist Z8).

What belongs here: names, and which of them there can be. What does not: bytes (`recipes.storage.object_store`).
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from recipes.contracts.job import StoreAddress
from recipes.storage import uris

KIND_BUCKETS = {"datasets": "datasets", "checkpoints": "checkpoints", "runs": "checkpoints", "artifacts": "checkpoints"}
UNUSABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""What no object's name can hold: control characters (a rule of obstore), and halves of characters, which no UTF-8 has."""


class BrokenArtifact(Exception):
    """Bytes in the store are not what their manifest or their name says."""


@dataclass(frozen=True)
class Location:
    bucket: str
    key: str


def locate(address: StoreAddress, uri: str) -> Location:
    """The bucket and key of a logical URI.

    Raises:
        BrokenArtifact: it is no URI of this store.
    """
    scheme, _, rest = uri.partition("://")
    logical, _, key = rest.partition("/")
    key = key.strip("/")
    # Not urlparse: it drops newlines, and takes `#`, `?` and `%` in a name for syntax.
    if scheme != "s3" or not logical or any(part in ("", ".", "..") or UNUSABLE.search(part) for part in key.split("/")):
        raise BrokenArtifact(f"not a URI of this store: {uri!r}")
    if logical == uris.PRODUCT_BUCKET:
        kind = key.split("/")[0]
        if kind not in KIND_BUCKETS:
            raise BrokenArtifact(f"{uri}: '{kind}' is none of {', '.join(KIND_BUCKETS)}")
        return Location(address.buckets[KIND_BUCKETS[kind]], key)
    if logical == uris.MODELS_BUCKET:
        return Location(address.buckets["models"], key)
    raise BrokenArtifact(f"{uri}: unknown logical bucket '{logical}' ({' and '.join(uris.BUCKETS)} exist)")


def local_root(address: StoreAddress) -> Path | None:
    """The folder that holds the buckets in embedded mode; None where they are on an S3 server."""
    root = urlparse(address.root)
    return Path(unquote(root.path)) if root.scheme == "file" else None


def refuse_links(folder: Path, key: str, uri: str) -> None:
    """In a folder, a symbolic link would be a way out of it: whatever lies behind one is not in the store.

    Raises:
        BrokenArtifact: a part of the key is a symbolic link.
    """
    place = folder
    for part in key.split("/"):
        place = place / part
        if place.is_symlink():
            raise BrokenArtifact(f"{uri}: a part of it is a symbolic link, and the store holds none")
