"""Where the chunks of files lie: below the datasets of one organization, each under its own hash, so once for all versions.

Not for all organizations: whoever could ask whether a chunk is there would learn what others have.
"""

import re

from recipes.addresses import BrokenArtifact
from recipes.storage import uris

FOLDER = "_chunks"
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
    return f"{uris.DATASETS}{organization}/{FOLDER}"


def chunk_uri(uri: str, sha256: str) -> str:
    """Where a chunk of a file below `uri` lies."""
    return f"{chunk_folder(uri)}/{sha256[:2]}/{sha256}"


def hash_in_name(uri: str) -> str | None:
    """The SHA-256 that a chunk says itself; None of what is no chunk."""
    found = re.fullmatch(rf"{uris.DATASETS}/(?:@[^/]+/)?{FOLDER}/[0-9a-f]{{2}}/([0-9a-f]{{64}})", uri)
    return found[1] if found else None
