"""A run's checkpoints in the object store: background uploads, retention, and downloads.

Local folders are in `recipes.checkpoints.manager`.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError

from recipes.checkpoints.commit import hash_checkpoint_files, link_file, place_files, rename_durably, with_metadata
from recipes.checkpoints.node_parts import (
    PART_KEY,
    PARTS_FOLDER,
    CheckpointPart,
    NodeShard,
    SafetensorsHeader,
    part_from_manifest,
    part_in_folder,
    read_safetensors_header,
    upload_part,
)
from recipes.checkpoints.retention import CheckpointQuality, parse_quality, select_kept_steps
from recipes.checkpoints.upload import compress_checkpoint, decompress_checkpoint, is_compressed, retry_upload
from recipes.runner import Restart, log_line
from recipes.storage.artifact_store import MANIFEST_FILE, BrokenArtifact, Store
from recipes.storage.manifest import Manifest
from recipes.storage.object_transfer import prefetch

DOWNLOAD_FOLDER = ".download"
UPLOAD_FOLDER = ".upload"
"""Folder for files that are converted for upload; there is one upload thread."""
SLOW_UPLOAD_SECONDS = 60.0
"""After a slower upload, queued checkpoints are skipped if newer ones wait: uploading all would never catch up."""


class RemoteCheckpoints:
    """Checkpoints below a logical URI, one folder per step.

    Args:
        folder: the local folder with one folder per step.
        keep_last: number of newest checkpoints to keep in the store, in addition to the best.
        compression: format of uploads.
    """

    def __init__(self, folder: Path, store: Store, uri: str, keep_last: int, compression: Literal["zstd"] | None) -> None:
        self.folder = folder
        self.store = store
        self.uri = uri
        self.keep_last = keep_last
        self.compression = compression
        self.removal_lock = threading.Lock()
        """Held while choosing the next local checkpoint to upload, and while removing one."""
        self.uploading_step: int | None = None
        self.complete_steps: set[int] = set()
        """Steps known to be complete in the store."""
        self._last_upload_seconds = 0.0
        self._uploader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-upload")
        self._last_upload: Future[None] | None = None
        self._failed_uploads: list[tuple[int, Callable[[], None]]] = []

    def branch(self, way: str) -> "RemoteCheckpoints":
        """Return the checkpoints of a branch; "." is this one."""
        uri = self.uri if way == "." else f"{self.uri}/{way}"
        return RemoteCheckpoints(self.folder / way, self.store, uri, self.keep_last, self.compression)

    def steps(self) -> list[int]:
        """List complete steps, newest first."""
        self.complete_steps = {step for step, whole in self.folders().items() if whole}
        return sorted(self.complete_steps, reverse=True)

    def folders(self) -> dict[int, bool]:
        """Return all steps in the store, with whether their manifest exists."""
        found: dict[int, bool] = {}
        for uri in self.store.list(self.uri):
            step, *rest = uri.removeprefix(self.uri + "/").split("/")
            if step.isdigit() and rest:
                found[int(step)] = found.get(int(step), False) or rest == [MANIFEST_FILE]
        return found

    def quality(self, step: int) -> CheckpointQuality:
        try:
            return parse_quality(self.store.get_bytes(f"{self.uri}/{step}/{MANIFEST_FILE}"))
        except FileNotFoundError:
            return CheckpointQuality()

    def fetch(self, step: int, share: NodeShard | None = None) -> bool:
        """Fetch the uploaded checkpoint of `step`, or a share of it.

        Return False if it is missing or corrupt. If a part of it is on this machine, only the rest is downloaded.

        Raises:
            Restart: it is corrupt and a part is here: the machines may still have valid parts, and upload them again.
        """
        uri = f"{self.uri}/{step}"
        if not self.store.exists(f"{uri}/{MANIFEST_FILE}"):
            return False
        try:
            try:
                manifest, source = self._download(step, share)
            except BrokenArtifact as error:
                log_line(f"checkpoint {step} was corrupted in transit ({error}): fetching it again")
                manifest, source = self._download(step, share)
        except BrokenArtifact as error:
            self.delete(step)
            if part_in_folder(self.folder / str(step)):
                raise Restart(f"uploaded checkpoint {step} is broken ({error}): its parts may be whole") from None
            log_line(f"uploaded checkpoint {step} is broken ({error}): falling back")
            return False
        temporary = self.folder / f".{step}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        if is_compressed(manifest):
            manifest = decompress_checkpoint(source, manifest, temporary)
        else:
            downloaded = source.is_relative_to(self.folder)  # otherwise it is in the store's own folder
            names = [file.path for file in manifest.files]
            place_files(source, temporary, names, os.replace if downloaded else shutil.copyfile)
        (temporary / MANIFEST_FILE).write_bytes(manifest.to_bytes())
        rename_durably(temporary, self.folder / str(step))
        shutil.rmtree(self.folder / DOWNLOAD_FOLDER, ignore_errors=True)
        log_line(f"checkpoint {step} restored from {uri}")
        return True

    def _download(self, step: int, share: NodeShard | None) -> tuple[Manifest, Path]:
        """Return the manifest and files of an uploaded checkpoint, or of a share of it.

        Raises BrokenArtifact.
        """
        artifact = self.store.find(f"{self.uri}/{step}")
        if artifact is None:
            raise BrokenArtifact(f"{self.uri}/{step} has no readable manifest")
        manifest = self._select_shard(self.store.manifest(artifact), step, share)
        names = {file.path for file in manifest.files}
        link_local_part(self.folder / str(step), self.folder / DOWNLOAD_FOLDER / artifact.digest, names)
        return manifest, self.store.fetch(artifact, self.folder / DOWNLOAD_FOLDER, names)

    def _select_shard(self, whole: Manifest, step: int, share: NodeShard | None) -> Manifest:
        """Reduce a manifest to a share of the checkpoint.

        Compressed checkpoints are fetched as a whole, since their headers cannot be read; so are those with unreadable
        files, which are then found to be corrupt.
        """
        if share is None or is_compressed(whole):
            return whole
        try:
            selected = share.files(
                whole, lambda paths: prefetch(partial(self._header, step), paths, self.store.concurrent_files)
            )
        except (FileNotFoundError, ValidationError):
            return whole
        if len(selected) == len(whole.files):
            return whole
        part = CheckpointPart(number=share.number, of=share.of, save=share.label_content(hash_checkpoint_files(whole)))
        files = tuple(file for file in whole.files if file.path in selected)
        return with_metadata(whole.model_copy(update={"files": files}), {PART_KEY: part.model_dump(mode="json")})

    def _header(self, step: int, path: str) -> SafetensorsHeader:
        """Read a header without verification: it only selects the files to fetch, which are verified."""
        stored = self.store.open(f"{self.uri}/{step}/{path}")
        return read_safetensors_header(lambda start, stop: b"".join(stored.chunks(start, stop)))

    def delete(self, step: int) -> None:
        self.complete_steps.discard(step)
        self.store.delete(
            f"{self.uri}/{step}/{PARTS_FOLDER}"
        )  # left by a kill during completion; they would complete it again
        self.store.delete(f"{self.uri}/{step}")
        self.store.remove_empty_folders(f"{self.uri}/{step}")

    def upload(self, step: int, should_upload: Callable[[bool], bool], prune: Callable[[], None]) -> None:
        """Upload a local checkpoint in the background.

        Args:
            should_upload: returns at its turn whether to upload it; called with True if uploads are slow.
            prune: removes local checkpoints that were only kept for the upload.
        """

        def upload_once() -> None:
            began = time.monotonic()
            with self._reserve(step, should_upload) as is_reserved:
                if not is_reserved:
                    log_line(f"checkpoint {step} was not uploaded: newer ones came before its turn")
                    return
                self.send(step)
                self._check_after_upload(step)
            self._last_upload_seconds = time.monotonic() - began
            prune()

        self._last_upload = self._uploader.submit(self._with_retries, step, upload_once)

    @contextmanager
    def _reserve(self, step: int, should_upload: Callable[[bool], bool]) -> Iterator[bool]:
        """Yield whether the local checkpoint exists and should be uploaded; it cannot be removed meanwhile."""
        with self.removal_lock:
            is_reserved = (self.folder / str(step)).is_dir() and should_upload(
                self._last_upload_seconds > SLOW_UPLOAD_SECONDS
            )
            self.uploading_step = step if is_reserved else None
        try:
            yield is_reserved
        finally:
            self.uploading_step = None

    def send(self, step: int) -> None:
        """Upload the local checkpoint of `step`, or this machine's part."""
        folder, uri = self.folder / str(step), f"{self.uri}/{step}"
        # Read the manifest now: facts may have been added since an upload was given up, and are not added again.
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
        part = part_from_manifest(manifest)
        try:
            if self.compression:
                plain, folder = folder, self.folder / UPLOAD_FOLDER
                shutil.rmtree(folder, ignore_errors=True)
                manifest = compress_checkpoint(plain, manifest, folder)
            if part:
                upload_part(self.store, folder, uri, manifest, part)
            else:
                self.store.publish_described(folder, uri, manifest)
        finally:
            shutil.rmtree(self.folder / UPLOAD_FOLDER, ignore_errors=True)

    def _check_after_upload(self, step: int) -> None:
        """Update the list of complete checkpoints after an upload; one machine prunes for all."""
        part = part_in_folder(self.folder / str(step))
        if part and part.number > 1:
            self.steps()
        else:
            self._prune()

    def prune(self) -> None:
        """Delete old checkpoints after pending uploads.

        Errors are only logged.
        """

        def upload_once() -> None:
            try:
                self._prune()
            except Exception as error:
                log_line(f"old checkpoints were not deleted: {type(error).__name__}: {' '.join(str(error).split())}")

        self._last_upload = self._uploader.submit(upload_once)

    def _prune(self) -> None:
        """Delete checkpoints that are not kept, and incomplete ones from interrupted uploads or deletions.

        One thread uploads and deletes, so that nothing of this machine is in progress. Parts of other machines, which may be
        ahead or far behind, are only deleted when a newer checkpoint is complete, because all machines are past them then.
        If this machine still has its part, the checkpoint may be completed later.
        """
        folders = self.folders()
        self.complete_steps = {step for step, whole in folders.items() if whole}
        stay = select_kept_steps({step: self.quality(step) for step in self.complete_steps}, self.keep_last)
        newest = max(self.complete_steps, default=0)
        for old in set(folders) - stay:
            if old in self.complete_steps or (old < newest and part_in_folder(self.folder / str(old)) is None):
                self.delete(old)

    def update_metadata(self, step: int, facts: Mapping[str, JsonValue]) -> None:
        """Add facts to a manifest after pending uploads."""

        def upload_once() -> None:
            uri = f"{self.uri}/{step}"
            if artifact := self.store.find(uri):
                self.store.put_manifest(uri, with_metadata(self.store.manifest(artifact), facts))

        self._last_upload = self._uploader.submit(self._with_retries, step, upload_once)

    def _with_retries(self, step: int, attempt: Callable[[], None]) -> None:
        """Run an upload with retries.

        Raises the last error; the upload is repeated after a later one has succeeded.
        """
        try:
            retry_upload(step, attempt)
        except Exception:
            self._failed_uploads.append((step, attempt))
            raise
        self._retry_failed_uploads()

    def _retry_failed_uploads(self) -> None:
        """Repeat failed uploads when the store answers again.

        The run's best checkpoint may be among them.
        """
        while self._failed_uploads:
            step, attempt = self._failed_uploads[0]
            try:
                attempt()
            except Exception as error:
                log_line(f"upload of checkpoint {step} failed again: {type(error).__name__}: {' '.join(str(error).split())}")
                return
            del self._failed_uploads[0]

    def has_pending_uploads(self) -> bool:
        return self._last_upload is not None and not self._last_upload.done()

    def wait(self) -> None:
        """Wait for uploads.

        Raises the newest upload's error; errors of earlier ones are only logged.
        """
        if self._last_upload:  # uploads are sequential: if the newest is done, all are
            self._last_upload.result()

    def drain_uploads(self) -> None:
        """Wait for uploads, ignoring their errors; nothing is uploaded after this returns."""
        self._uploader.submit(lambda: None).result()


def link_local_part(part: Path, download: Path, names: Collection[str]) -> None:
    """Link files of a local part, so that they are not downloaded.

    Corruption is detected when all are hashed.
    """
    if part_in_folder(part) is not None:
        with suppress(OSError):  # the file system may not support links
            place_files(part, download, [name for name in names if (part / name).exists()], link_file)
