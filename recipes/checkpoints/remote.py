"""A run's checkpoints as they lie in the store: they arrive in the background, one after the other, and the best ones stay.

What belongs here: uploads, retention there, and the way back. What does not: the local folder
(`recipes.checkpoints.manager`).
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
"""What is uploaded in another form than it has here; one thread uploads."""
SLOW_UPLOAD_SECONDS = 60.0
"""After an upload that took longer, those are left out that a newer one waits behind: in turn, none would ever arrive."""


class RemoteCheckpoints:
    """Below a logical URI, one folder a step.

    Args:
        folder: the local one, with one folder a step.
        keep_last: how many of the newest stay in the store, besides the best one.
        compression: of what is uploaded.
    """

    def __init__(self, folder: Path, store: Store, uri: str, keep_last: int, compression: Literal["zstd"] | None) -> None:
        self.folder = folder
        self.store = store
        self.uri = uri
        self.keep_last = keep_last
        self.compression = compression
        self.removal_lock = threading.Lock()
        """Held while it is decided which local checkpoint is uploaded next, or is removed."""
        self.uploading_step: int | None = None
        self.complete_steps: set[int] = set()
        """Steps that are known to be here."""
        self._last_upload_seconds = 0.0
        self._uploader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-upload")
        self._last_upload: Future[None] | None = None
        self._failed_uploads: list[tuple[int, Callable[[], None]]] = []

    def branch(self, way: str) -> "RemoteCheckpoints":
        """Those in a folder below, as seen by the run that wrote them there; "." is none."""
        uri = self.uri if way == "." else f"{self.uri}/{way}"
        return RemoteCheckpoints(self.folder / way, self.store, uri, self.keep_last, self.compression)

    def steps(self) -> list[int]:
        """Newest first; those that are whole."""
        self.complete_steps = {step for step, whole in self.folders().items() if whole}
        return sorted(self.complete_steps, reverse=True)

    def folders(self) -> dict[int, bool]:
        """Step -> whether its manifest is there, of everything that lies here."""
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
        """Bring the uploaded checkpoint of `step` to the local folder, or a share of it. False when it is not there or is
        broken.

        Where a part of it is here, the rest is fetched.

        Raises:
            Restart: it is broken, of which a part is here: all machines may still have theirs, and bring them once more.
        """
        uri = f"{self.uri}/{step}"
        if not self.store.exists(f"{uri}/{MANIFEST_FILE}"):
            return False
        try:
            try:
                manifest, source = self._download(step, share)
            except BrokenArtifact as error:
                log_line(f"checkpoint {step} came broken ({error}): fetching it once more, as it may be whole where it lies")
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
            downloaded = source.is_relative_to(self.folder)  # else it lies in the store itself
            names = [file.path for file in manifest.files]
            place_files(source, temporary, names, os.replace if downloaded else shutil.copyfile)
        (temporary / MANIFEST_FILE).write_bytes(manifest.to_bytes())
        rename_durably(temporary, self.folder / str(step))
        shutil.rmtree(self.folder / DOWNLOAD_FOLDER, ignore_errors=True)
        log_line(f"checkpoint {step} restored from {uri}")
        return True

    def _download(self, step: int, share: NodeShard | None) -> tuple[Manifest, Path]:
        """The manifest of the uploaded checkpoint of `step`, or of a share of it, and where its files are. Raises
        BrokenArtifact.
        """
        artifact = self.store.find(f"{self.uri}/{step}")
        if artifact is None:
            raise BrokenArtifact(f"{self.uri}/{step} has no readable manifest")
        manifest = self._select_shard(self.store.manifest(artifact), step, share)
        names = {file.path for file in manifest.files}
        link_local_part(self.folder / str(step), self.folder / DOWNLOAD_FOLDER / artifact.digest, names)
        return manifest, self.store.fetch(artifact, self.folder / DOWNLOAD_FOLDER, names)

    def _select_shard(self, whole: Manifest, step: int, share: NodeShard | None) -> Manifest:
        """Of a checkpoint, what is in a share of it. One that is compressed is fetched as a whole: no file says what it has;
        so is one whose files cannot be read, and is found broken.
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
        """It is not hashed: what it says decides no more than which files are fetched, and these are."""
        stored = self.store.open(f"{self.uri}/{step}/{path}")
        return read_safetensors_header(lambda start, stop: b"".join(stored.chunks(start, stop)))

    def delete(self, step: int) -> None:
        self.complete_steps.discard(step)
        self.store.delete(
            f"{self.uri}/{step}/{PARTS_FOLDER}"
        )  # of a kill as it became whole: they would make it so once more
        self.store.delete(f"{self.uri}/{step}")
        self.store.remove_empty_folders(f"{self.uri}/{step}")

    def upload(self, step: int, should_upload: Callable[[bool], bool], prune: Callable[[], None]) -> None:
        """Bring a local checkpoint here. `should_upload` says as its turn comes whether it is still, or with True whether it
        is still although uploads are slow; `prune` removes it there, if it was kept only for this.
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
        """Whether the local checkpoint is there; nobody removes it meanwhile."""
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
        """Upload the local checkpoint of `step`, or the part that lies here."""
        folder, uri = self.folder / str(step), f"{self.uri}/{step}"
        # As it is now: one whose upload was given up may have been told of since, and nobody tells it that again.
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
        """See what is whole after an upload; one machine prunes for all."""
        part = part_in_folder(self.folder / str(step))
        if part and part.number > 1:
            self.steps()
        else:
            self._prune()

    def prune(self) -> None:
        """Delete what does not stay, when all that was uploaded before has arrived. No run ends for what is left there."""

        def upload_once() -> None:
            try:
                self._prune()
            except Exception as error:
                log_line(f"old checkpoints were not deleted: {type(error).__name__}: {' '.join(str(error).split())}")

        self._last_upload = self._uploader.submit(upload_once)

    def _prune(self) -> None:
        """Delete what does not stay, and what has no manifest: the rest of an upload or of a deletion that broke off.

        Nobody would ever find it otherwise, and one thread does both, so that nothing is on its way meanwhile; but for parts
        of other machines. They may be ahead of this one, or far behind it; when a newer one is whole, all are past it. One
        of which a part is still here may be made up for.
        """
        folders = self.folders()
        self.complete_steps = {step for step, whole in folders.items() if whole}
        stay = select_kept_steps({step: self.quality(step) for step in self.complete_steps}, self.keep_last)
        newest = max(self.complete_steps, default=0)
        for old in set(folders) - stay:
            if old in self.complete_steps or (old < newest and part_in_folder(self.folder / str(old)) is None):
                self.delete(old)

    def update_metadata(self, step: int, facts: Mapping[str, JsonValue]) -> None:
        """Add facts to a manifest, when all that was uploaded before has arrived."""

        def upload_once() -> None:
            uri = f"{self.uri}/{step}"
            if artifact := self.store.find(uri):
                self.store.put_manifest(uri, with_metadata(self.store.manifest(artifact), facts))

        self._last_upload = self._uploader.submit(self._with_retries, step, upload_once)

    def _with_retries(self, step: int, attempt: Callable[[], None]) -> None:
        """Raises what the last attempt raised; it is made up for when one after it has succeeded."""
        try:
            retry_upload(step, attempt)
        except Exception:
            self._failed_uploads.append((step, attempt))
            raise
        self._retry_failed_uploads()

    def _retry_failed_uploads(self) -> None:
        """Do what was given up, as the store answers again: the best of a run may be among it, which comes once."""
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
        """For the uploads. Raises what the newest one raised: one that failed before it is only named in the log."""
        if self._last_upload:  # one thread uploads in order: when the newest is done, all are
            self._last_upload.result()

    def drain_uploads(self) -> None:
        """Wait for the uploads, however they end: nothing arrives after this."""
        self._uploader.submit(lambda: None).result()


def link_local_part(part: Path, download: Path, names: Collection[str]) -> None:
    """Of a part that is here, files need not come once more: what is wrong with them is seen as all are hashed."""
    if part_in_folder(part) is not None:
        with suppress(OSError):  # this disk may know no links
            place_files(part, download, [name for name in names if (part / name).exists()], link_file)
