"""The form in which a checkpoint is uploaded where its policy asks for `compression: zstd` (row I8): each file by itself.

The local checkpoint stays as it is, so that training does not wait for it. Weights in bfloat16 hardly shrink, states of an
optimizer that have not moved do.
"""

import shutil
from pathlib import Path

from recipes.storage.artifact_store import describe
from recipes.storage.manifest import Manifest

FACT = "compression"
SUFFIX = ".zst"
AT_ONCE = 1 << 20
"""Bytes in memory."""


def is_compressed(manifest: Manifest) -> bool:
    return FACT in manifest.facts


def compress(folder: Path, manifest: Manifest, target: Path) -> Manifest:
    """Write the files of a checkpoint into `target`, compressed. Returns the manifest to upload them with."""
    from pyarrow import CompressedOutputStream, OSFile  # a third of a second, for whoever asks for it

    for record in manifest.files:
        place = target / f"{record.path}{SUFFIX}"
        place.parent.mkdir(parents=True, exist_ok=True)
        with (folder / record.path).open("rb") as plain, CompressedOutputStream(OSFile(str(place), "wb"), "zstd") as file:
            shutil.copyfileobj(plain, file, AT_ONCE)
    return manifest.model_copy(update={"files": describe(target), "facts": {**manifest.facts, FACT: "zstd"}})


def decompress(folder: Path, manifest: Manifest, target: Path) -> Manifest:
    """Write the files of an uploaded checkpoint into `target` as they were. Returns the manifest that they had."""
    from pyarrow import CompressedInputStream, OSFile

    for record in manifest.files:
        place = target / record.path.removesuffix(SUFFIX)
        place.parent.mkdir(parents=True, exist_ok=True)
        with CompressedInputStream(OSFile(str(folder / record.path)), "zstd") as file, place.open("wb") as plain:
            shutil.copyfileobj(file, plain, AT_ONCE)
    facts = {name: fact for name, fact in manifest.facts.items() if name != FACT}
    return manifest.model_copy(update={"files": describe(target), "facts": facts})
