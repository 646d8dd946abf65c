"""Compress checkpoints for upload, and retry failed uploads."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tenacity import RetryCallState, Retrying

from recipes.runner import log_line
from recipes.storage.artifact_store import describe_files
from recipes.storage.manifest import Manifest
from recipes.storage.retry import after_pauses

# Uploads with retries: a short outage of the store or the network must not lose a checkpoint.

RETRY_PAUSES_SECONDS = (1.0, 4.0)
"""Pauses before the second and the third attempt; after that the upload has failed."""


def retry_upload(step: int, upload: Callable[[], None]) -> None:
    """Upload the checkpoint of `step`. Raises the error of the last attempt."""

    def report(error: BaseException | None, then: str) -> None:
        log_line(f"upload of checkpoint {step} failed, {then}: {type(error).__name__}: {' '.join(str(error).split())}")

    def report_pause(state: RetryCallState) -> None:
        report(state.outcome.exception() if state.outcome else None, f"again in {state.upcoming_sleep:.0f} s")

    try:
        Retrying(before_sleep=report_pause, **after_pauses(*RETRY_PAUSES_SECONDS))(upload)
    except Exception as error:
        report(error, "given up")
        raise


# Compression of uploads with `compression: zstd` in the checkpoint policy, file by file.
#
# The local checkpoint is not compressed, so that training does not wait. bfloat16 weights hardly shrink, unchanged optimizer
# states do.

COMPRESSION_KEY = "compression"
COMPRESSED_SUFFIX = ".zst"
COPY_BUFFER_BYTES = 1 << 20
"""Size of the copy buffer."""


def is_compressed(manifest: Manifest) -> bool:
    return COMPRESSION_KEY in manifest.facts


def compress_checkpoint(folder: Path, manifest: Manifest, target: Path) -> Manifest:
    """Write a checkpoint's files to `target` compressed. Returns the manifest for the upload."""
    from pyarrow import CompressedOutputStream, OSFile  # takes a third of a second to import

    for record in manifest.files:
        place = target / f"{record.path}{COMPRESSED_SUFFIX}"
        place.parent.mkdir(parents=True, exist_ok=True)
        with (folder / record.path).open("rb") as plain, CompressedOutputStream(OSFile(str(place), "wb"), "zstd") as file:
            shutil.copyfileobj(plain, file, COPY_BUFFER_BYTES)
    return manifest.model_copy(
        update={"files": describe_files(target), "facts": {**manifest.facts, COMPRESSION_KEY: "zstd"}}
    )


def decompress_checkpoint(folder: Path, manifest: Manifest, target: Path) -> Manifest:
    """Write an uploaded checkpoint's files to `target` decompressed. Returns their original manifest."""
    from pyarrow import CompressedInputStream, OSFile

    for record in manifest.files:
        place = target / record.path.removesuffix(COMPRESSED_SUFFIX)
        place.parent.mkdir(parents=True, exist_ok=True)
        with CompressedInputStream(OSFile(str(folder / record.path)), "zstd") as file, place.open("wb") as plain:
            shutil.copyfileobj(file, plain, COPY_BUFFER_BYTES)
    facts = {name: fact for name, fact in manifest.facts.items() if name != COMPRESSION_KEY}
    return manifest.model_copy(update={"files": describe_files(target), "facts": facts})
