"""The form in which a checkpoint is uploaded where its policy asks for `compression: zstd` (row I8): each file by itself.

The local checkpoint stays as it is, so that training does not wait for it. Weights in bfloat16 hardly shrink, states of an
optimizer that have not moved do.
"""

import shutil
from pathlib import Path

from recipes.storage.artifact_store import describe_files
from recipes.storage.manifest import Manifest

COMPRESSION_KEY = "compression"
COMPRESSED_SUFFIX = ".zst"
COPY_BUFFER_BYTES = 1 << 20
"""Bytes in memory."""


def is_compressed(manifest: Manifest) -> bool:
    return COMPRESSION_KEY in manifest.facts


def compress_checkpoint(folder: Path, manifest: Manifest, target: Path) -> Manifest:
    """Write the files of a checkpoint into `target`, compressed. Returns the manifest to upload them with."""
    from pyarrow import CompressedOutputStream, OSFile  # a third of a second, for whoever asks for it

    for record in manifest.files:
        place = target / f"{record.path}{COMPRESSED_SUFFIX}"
        place.parent.mkdir(parents=True, exist_ok=True)
        with (folder / record.path).open("rb") as plain, CompressedOutputStream(OSFile(str(place), "wb"), "zstd") as file:
            shutil.copyfileobj(plain, file, COPY_BUFFER_BYTES)
    return manifest.model_copy(
        update={"files": describe_files(target), "facts": {**manifest.facts, COMPRESSION_KEY: "zstd"}}
    )


def decompress_checkpoint(folder: Path, manifest: Manifest, target: Path) -> Manifest:
    """Write the files of an uploaded checkpoint into `target` as they were. Returns the manifest that they had."""
    from pyarrow import CompressedInputStream, OSFile

    for record in manifest.files:
        place = target / record.path.removesuffix(COMPRESSED_SUFFIX)
        place.parent.mkdir(parents=True, exist_ok=True)
        with CompressedInputStream(OSFile(str(folder / record.path)), "zstd") as file, place.open("wb") as plain:
            shutil.copyfileobj(file, plain, COPY_BUFFER_BYTES)
    facts = {name: fact for name, fact in manifest.facts.items() if name != COMPRESSION_KEY}
    return manifest.model_copy(update={"files": describe_files(target), "facts": facts})
