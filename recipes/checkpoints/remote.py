"""A run's checkpoints as they lie in the store: they arrive in the background, one after the other, and the best ones stay.

What belongs here: uploads, retention there, and the way back. What does not: the local folder (`recipes.checkpoints.manager`).
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

from recipes.checkpoints.commit import digest_of, give_name, with_facts
from recipes.checkpoints.compression import compress, decompress, is_compressed
from recipes.checkpoints.node_parts import PART, PARTS, Part, part_in, part_of, put_part
from recipes.checkpoints.retention import Standing, kept, standing_of
from recipes.checkpoints.shard_selection import Header, Share, read_header
from recipes.checkpoints.upload_retry import retry_upload
from recipes.runner import Restart, say
from recipes.storage.artifact_store import MANIFEST, BrokenArtifact, Store
from recipes.storage.manifest import Manifest
from recipes.storage.prefetch import ahead
from recipes.wanted_files import bring, link

DOWNLOAD = ".download"
UPLOAD = ".upload"
"""What is uploaded in another form than it has here; one thread uploads."""
SLOW_SECONDS = 60.0
"""After an upload that took longer, those are left out that a newer one waits behind: in turn, none would ever arrive."""


class StoredCheckpoints:
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
        self.taking = threading.Lock()
        """Held while it is decided which local checkpoint is uploaded next, or is removed."""
        self.busy_with: int | None = None
        self.arrived: set[int] = set()
        """Steps that are known to be here."""
        self._took = 0.0
        self._uploader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-upload")
        self._newest: Future[None] | None = None
        self._given_up: list[tuple[int, Callable[[], None]]] = []

    def below(self, way: str) -> "StoredCheckpoints":
        """Those in a folder below, as seen by the run that wrote them there; "." is none."""
        uri = self.uri if way == "." else f"{self.uri}/{way}"
        return StoredCheckpoints(self.folder / way, self.store, uri, self.keep_last, self.compression)

    def steps(self) -> list[int]:
        """Newest first; those that are whole."""
        self.arrived = {step for step, whole in self.folders().items() if whole}
        return sorted(self.arrived, reverse=True)

    def folders(self) -> dict[int, bool]:
        """Step -> whether its manifest is there, of everything that lies here."""
        found: dict[int, bool] = {}
        for uri in self.store.list(self.uri):
            step, *rest = uri.removeprefix(self.uri + "/").split("/")
            if step.isdigit() and rest:
                found[int(step)] = found.get(int(step), False) or rest == [MANIFEST]
        return found

    def standing(self, step: int) -> Standing:
        try:
            return standing_of(self.store.get_bytes(f"{self.uri}/{step}/{MANIFEST}"))
        except FileNotFoundError:
            return Standing()

    def fetch(self, step: int, share: Share | None = None) -> bool:
        """Bring the uploaded checkpoint of `step` to the local folder, or a share of it. False when it is not there or is
        broken.

        Where a part of it is here, the rest is fetched.

        Raises:
            Restart: it is broken, of which a part is here: all machines may still have theirs, and bring them once more.
        """
        uri = f"{self.uri}/{step}"
        if not self.store.exists(f"{uri}/{MANIFEST}"):
            return False
        try:
            try:
                manifest, source = self._fetched(step, share)
            except BrokenArtifact as error:
                say(f"checkpoint {step} came broken ({error}): fetching it once more, as it may be whole where it lies")
                manifest, source = self._fetched(step, share)
        except BrokenArtifact as error:
            self.delete(step)
            if part_in(self.folder / str(step)):
                raise Restart(f"uploaded checkpoint {step} is broken ({error}): its parts may be whole") from None
            say(f"uploaded checkpoint {step} is broken ({error}): falling back")
            return False
        scratch = self.folder / f".{step}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        if is_compressed(manifest):
            manifest = decompress(source, manifest, scratch)
        else:
            downloaded = source.is_relative_to(self.folder)  # else it lies in the store itself
            names = [file.path for file in manifest.files]
            bring(source, scratch, names, os.replace if downloaded else shutil.copyfile)
        (scratch / MANIFEST).write_bytes(manifest.to_bytes())
        give_name(scratch, self.folder / str(step))
        shutil.rmtree(self.folder / DOWNLOAD, ignore_errors=True)
        say(f"checkpoint {step} restored from {uri}")
        return True

    def _fetched(self, step: int, share: Share | None) -> tuple[Manifest, Path]:
        """The manifest of the uploaded checkpoint of `step`, or of a share of it, and where its files are. Raises
        BrokenArtifact.
        """
        artifact = self.store.find(f"{self.uri}/{step}")
        if artifact is None:
            raise BrokenArtifact(f"{self.uri}/{step} has no readable manifest")
        manifest = self._shared(self.store.manifest(artifact), step, share)
        names = {file.path for file in manifest.files}
        lend(self.folder / str(step), self.folder / DOWNLOAD / artifact.digest, names)
        return manifest, self.store.fetch(artifact, self.folder / DOWNLOAD, names)

    def _shared(self, whole: Manifest, step: int, share: Share | None) -> Manifest:
        """Of a checkpoint, what is in a share of it. One that is compressed is fetched as a whole: no file says what it has;
        so is one whose files cannot be read, and is found broken.
        """
        if share is None or is_compressed(whole):
            return whole
        try:
            wanted = share.files(whole, lambda paths: ahead(partial(self._header, step), paths, self.store.files_at_once))
        except (FileNotFoundError, ValidationError):
            return whole
        if len(wanted) == len(whole.files):
            return whole
        part = Part(number=share.number, of=share.of, save=share.mark(digest_of(whole)))
        files = tuple(file for file in whole.files if file.path in wanted)
        return with_facts(whole.model_copy(update={"files": files}), {PART: part.model_dump(mode="json")})

    def _header(self, step: int, path: str) -> Header:
        """It is not hashed: what it says decides no more than which files are fetched, and these are."""
        stored = self.store.open(f"{self.uri}/{step}/{path}")
        return read_header(lambda start, stop: b"".join(stored.chunks(start, stop)))

    def delete(self, step: int) -> None:
        self.arrived.discard(step)
        self.store.delete(f"{self.uri}/{step}/{PARTS}")  # of a kill as it became whole: they would make it so once more
        self.store.delete(f"{self.uri}/{step}")
        self.store.remove_empty_folders(f"{self.uri}/{step}")

    def upload(self, step: int, is_wanted: Callable[[bool], bool], prune: Callable[[], None]) -> None:
        """Bring a local checkpoint here. `is_wanted` says as its turn comes whether it is still, or with True whether it is
        still although uploads are slow; `prune` removes it there, if it was kept only for this.
        """

        def once() -> None:
            began = time.monotonic()
            with self._taken(step, is_wanted) as there:
                if not there:
                    say(f"checkpoint {step} was not uploaded: newer ones came before its turn")
                    return
                self.send(step)
                self._look_after(step)
            self._took = time.monotonic() - began
            prune()

        self._newest = self._uploader.submit(self._with_retries, step, once)

    @contextmanager
    def _taken(self, step: int, is_wanted: Callable[[bool], bool]) -> Iterator[bool]:
        """Whether the local checkpoint is there; nobody removes it meanwhile."""
        with self.taking:
            there = (self.folder / str(step)).is_dir() and is_wanted(self._took > SLOW_SECONDS)
            self.busy_with = step if there else None
        try:
            yield there
        finally:
            self.busy_with = None

    def send(self, step: int) -> None:
        """Upload the local checkpoint of `step`, or the part that lies here."""
        folder, uri = self.folder / str(step), f"{self.uri}/{step}"
        # As it is now: one whose upload was given up may have been told of since, and nobody tells it that again.
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        part = part_of(manifest)
        try:
            if self.compression:
                plain, folder = folder, self.folder / UPLOAD
                shutil.rmtree(folder, ignore_errors=True)
                manifest = compress(plain, manifest, folder)
            if part:
                put_part(self.store, folder, uri, manifest, part)
            else:
                self.store.publish_described(folder, uri, manifest)
        finally:
            shutil.rmtree(self.folder / UPLOAD, ignore_errors=True)

    def _look_after(self, step: int) -> None:
        """See what is whole after an upload; one machine prunes for all."""
        part = part_in(self.folder / str(step))
        if part and part.number > 1:
            self.steps()
        else:
            self._prune()

    def prune(self) -> None:
        """Delete what does not stay, when all that was uploaded before has arrived. No run ends for what is left there."""

        def once() -> None:
            try:
                self._prune()
            except Exception as error:
                say(f"old checkpoints were not deleted: {type(error).__name__}: {' '.join(str(error).split())}")

        self._newest = self._uploader.submit(once)

    def _prune(self) -> None:
        """Delete what does not stay, and what has no manifest: the rest of an upload or of a deletion that broke off.

        Nobody would ever find it otherwise, and one thread does both, so that nothing is on its way meanwhile; but for parts
        of other machines. They may be ahead of this one, or far behind it; when a newer one is whole, all are past it. One
        of which a part is still here may be made up for.
        """
        folders = self.folders()
        self.arrived = {step for step, whole in folders.items() if whole}
        stay = kept({step: self.standing(step) for step in self.arrived}, self.keep_last)
        newest = max(self.arrived, default=0)
        for old in set(folders) - stay:
            if old in self.arrived or (old < newest and part_in(self.folder / str(old)) is None):
                self.delete(old)

    def tell(self, step: int, facts: Mapping[str, JsonValue]) -> None:
        """Add facts to a manifest, when all that was uploaded before has arrived."""

        def once() -> None:
            uri = f"{self.uri}/{step}"
            if artifact := self.store.find(uri):
                self.store.put_manifest(uri, with_facts(self.store.manifest(artifact), facts))

        self._newest = self._uploader.submit(self._with_retries, step, once)

    def _with_retries(self, step: int, attempt: Callable[[], None]) -> None:
        """Raises what the last attempt raised; it is made up for when one after it has succeeded."""
        try:
            retry_upload(step, attempt)
        except Exception:
            self._given_up.append((step, attempt))
            raise
        self._make_up()

    def _make_up(self) -> None:
        """Do what was given up, as the store answers again: the best of a run may be among it, which comes once."""
        while self._given_up:
            step, attempt = self._given_up[0]
            try:
                attempt()
            except Exception as error:
                say(f"upload of checkpoint {step} failed again: {type(error).__name__}: {' '.join(str(error).split())}")
                return
            del self._given_up[0]

    def is_busy(self) -> bool:
        return self._newest is not None and not self._newest.done()

    def wait(self) -> None:
        """For the uploads. Raises what the newest one raised: one that failed before it is only named in the log."""
        if self._newest:  # one thread uploads in order: when the newest is done, all are
            self._newest.result()

    def finish(self) -> None:
        """Wait for the uploads, however they end: nothing arrives after this."""
        self._uploader.submit(lambda: None).result()


def lend(part: Path, download: Path, names: Collection[str]) -> None:
    """Of a part that is here, files need not come once more: what is wrong with them is seen as all are hashed."""
    if part_in(part) is not None:
        with suppress(OSError):  # this disk may know no links
            bring(part, download, [name for name in names if (part / name).exists()], link)
