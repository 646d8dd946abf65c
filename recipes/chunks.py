"""Where the chunks of files lie: below the datasets of one organization, each under its own hash, so once for all versions.

Not for all organizations: whoever could ask whether a chunk is there would learn what others have.
"""

from recipes.addresses import BrokenArtifact

DATASETS = "s3://hanzo-ml/datasets/"
FOLDER = "_chunks"
"""No dataset's name and no organization's folder begins with an underscore."""


def chunk_folder(uri: str) -> str:
    """The folder of all chunks of the organization whose datasets `uri` is below.

    Raises:
        BrokenArtifact: nothing there has chunks.
    """
    if not uri.startswith(DATASETS):
        raise BrokenArtifact(f"{uri} has chunks, and only datasets have")
    first = uri.removeprefix(DATASETS).partition("/")[0]
    organization = f"{first}/" if first.startswith("@") else ""
    return f"{DATASETS}{organization}{FOLDER}"


def chunk_uri(uri: str, sha256: str) -> str:
    """Where a chunk of a file below `uri` lies."""
    return f"{chunk_folder(uri)}/{sha256[:2]}/{sha256}"
