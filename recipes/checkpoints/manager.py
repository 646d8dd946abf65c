"""Checkpoints that can be trusted: temporary name, manifest with SHA-256 last, rename, upload, retention.

It happens while training goes on, locally first. A checkpoint without a valid manifest does not exist (specification row
I15): loading falls back to the one before it and says so. The last few stay, and the best beside them (rows I1, I7). What is
inside a checkpoint is the trainer's business.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from recipes.checkpoints.commit import (
    commit_checkpoint,
    find_corruption,
    free_disk_bytes,
    read_content_digest,
    update_metadata,
)
from recipes.checkpoints.disk_space import free_disk_space
from recipes.checkpoints.local import clean_interrupted_writes, list_local_steps, read_local_qualities, remove_steps_from
from recipes.checkpoints.node_parts import PART_KEY, AllWeights, NodeShard, part_in_folder
from recipes.checkpoints.remote import RemoteCheckpoints
from recipes.checkpoints.retention import CheckpointQuality, rank_by_loss, select_kept_steps
from recipes.runner import Restart, log_line
from recipes.storage.artifact_store import MANIFEST_FILE, Store


class CheckpointManager:
    """The checkpoints of one run: a local folder with one folder a step, mirrored below a logical URI.

    Args:
        folder: local; survives a restart on the same machine.
        store, uri: where uploads go, and where a new machine finds them.
        keep_last: how many of the newest stay, locally and in the store, besides the best one.
        compression: of what is uploaded.
        before: those that the run has come from, and the step at which it left them.
        share: what this machine fetches of those that it goes on from; None: all.
        free: how many bytes the disk of a folder has left.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        uri: str,
        keep_last: int,
        compression: Literal["zstd"] | None = None,
        origin: "tuple[CheckpointManager, int] | None" = None,
        free: Callable[[Path], int] = free_disk_bytes,
        share: NodeShard | None = None,
    ) -> None:
        self.folder = folder
        self.store = store
        self.uri = uri
        self.keep_last = keep_last
        self.origin = origin
        self.share = share
        self._free_bytes = free
        self.stored = RemoteCheckpoints(folder, store, uri, keep_last, compression)
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-seal")
        self._pending_commit: Future[None] | None = None
        self._deferred_parts: set[int] = set()

    def branch(self, name: str, branched_at: int = 0) -> "CheckpointManager":
        """Checkpoints of their own in a folder below these, which stay as they are: of a run that left these at a step."""
        uri, compression = f"{self.uri}/{name}", self.stored.compression
        below = self.folder / name
        return CheckpointManager(
            below, self.store, uri, self.keep_last, compression, (self, branched_at), self._free_bytes, self.share
        )

    @contextmanager
    def save(
        self,
        step: int,
        facts: Mapping[str, JsonValue] | None = None,
        log_message: str | None = None,
        start_remaining_writes: Callable[[], "Future[None] | None"] = lambda: None,
        *,
        defer_upload: bool = False,
    ) -> Iterator[Path]:
        """A folder to write into; it becomes the checkpoint of `step` after the block has ended without an error, and after
        what `start_remaining_writes` has begun then, which writes into it too.

        `facts` go into its manifest: what `retention.VALIDATION_LOSS_KEY` names decides which checkpoint is the best.
        `log_message` is for the log, once there is the checkpoint. A part that `defer_upload` is uploaded with the next one
        that does not, or at the end, where it is still the newest or the best.

        Raises what kept the one before from becoming a checkpoint.
        """
        self.wait_for_commit()
        self.free_disk_space()
        temporary = self.folder / f".{step}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            rest = start_remaining_writes()
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._pending_commit = self._committer.submit(
            self._commit, temporary, step, facts or {}, log_message, rest, defer_upload
        )

    def _commit(
        self,
        temporary: Path,
        step: int,
        facts: Mapping[str, JsonValue],
        log_message: str | None,
        rest: "Future[None] | None",
        defer_upload: bool,
    ) -> None:
        try:
            if rest:
                rest.result()
            commit_checkpoint(temporary, self.folder / str(step), facts)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if log_message:
            log_line(log_message)
        if PART_KEY not in facts:
            self.stored.upload(step, partial(self._should_upload, step), self._prune)
        else:
            self._deferred_parts.add(step)
            if not defer_upload:
                self._upload_parts()
        self._prune()

    def _upload_parts(self) -> None:
        """Those that wait, the newest first: nobody removes it here meanwhile. Older ones than these nobody needs."""
        selected = self._deferred_parts & select_kept_steps(read_local_qualities(self.folder), 1)
        self._deferred_parts.clear()
        for step in sorted(selected, reverse=True):
            self.stored.upload(step, partial(self._should_upload, step), self._prune)

    def has_pending_uploads(self) -> bool:
        """Whether what was written before is still on its way to the store.

        Where one machine is, the next part waits on all: each uploaded what was its newest as it came to it, another step
        than the others did, and none was ever whole.
        """
        self.wait_for_commit()
        return self.stored.has_pending_uploads()

    def wait_for_commit(self) -> None:
        """Wait until what was written is a checkpoint here. Raises what kept it from becoming one, once."""
        newest, self._pending_commit = self._pending_commit, None
        if newest:
            newest.result()

    def raise_if_failed(self) -> None:
        """Raise what has kept the newest from becoming a checkpoint: the next may be an hour away."""
        if self._pending_commit and self._pending_commit.done():
            self.wait_for_commit()

    def _kept_locally(self) -> set[int]:
        """Of parts at least two: while this machine has the newest, another may have no more than the one before."""
        standings = read_local_qualities(self.folder)
        has_parts = any(part_in_folder(self.folder / str(step)) for step in standings)
        return select_kept_steps(standings, max(2, self.keep_last) if has_parts else self.keep_last)

    def _prune(self) -> None:
        """Remove the local checkpoints that do not stay, but for one that is on its way to the store."""
        with self.stored.removal_lock:
            for old in set(self.local_steps()) - self._kept_locally() - {self.stored.uploading_step}:
                shutil.rmtree(self.folder / str(old))

    def free_disk_space(self, kept_step: int | None = None) -> None:
        """Where the disk has none for one more as large as the newest, those go that the store has too, the oldest first.

        The newest stays, and the one that is `kept_step`.
        """
        free_disk_space(self.folder, self.stored, kept_step, self._free_bytes)

    def _should_upload(self, step: int, slow: bool) -> bool:
        """Whether a checkpoint is uploaded as its turn comes; where uploads are slow, the newest and the best alone."""
        return step in select_kept_steps(read_local_qualities(self.folder), 1 if slow else self.keep_last)

    def update_metadata(self, step: int, facts: Mapping[str, JsonValue]) -> None:
        """Add facts to the manifest of the checkpoint of `step`, here and in the background in the store."""
        self.wait_for_commit()
        if (self.folder / str(step) / MANIFEST_FILE).exists():
            update_metadata(self.folder / str(step), facts)
        self.stored.update_metadata(step, facts)

    def upload_missing(self) -> None:
        """Upload the newest, and the best of all where it is here, where a kill or the store has cut that off: they would be
        on one machine alone. What a kill has left half there is deleted, and half here.

        For whoever goes on from the newest, which has seen that it is whole.
        """
        self._prune()
        local = self.local_steps()
        missing = select_kept_steps(self._qualities(), 1) - {*self.stored_steps()}
        for step in sorted(missing):
            if step == local[0] or find_corruption(self.folder / str(step), step) is None:
                self.stored.upload(step, partial(self._should_upload, step), self._prune)
        if not missing:
            self.stored.prune()

    def wait(self) -> None:
        """Wait for the uploads. Raises what the newest one raised: one that failed before it is only named in the log."""
        self.wait_for_commit()
        self._upload_parts()
        self.stored.wait()

    def require_complete_parts(self) -> None:
        """After the uploads of all machines: what they have saved together is whole, and what does not stay is gone.

        The best of all, which may be in the store alone: what is the best of those here others did not upload for that.

        Raises:
            Restart: of the newest or the best, a part has not arrived; its machine tries again as the run goes on.
        """
        parts = {step for step in self.local_steps() if part_in_folder(self.folder / str(step))}
        if missing := (parts & select_kept_steps(self._qualities(), 1)) - {*self.stored_steps()}:
            raise Restart(f"not all machines' parts of checkpoint {max(missing)} have arrived in the store")
        if parts:
            self.stored.prune()

    def local_steps(self) -> list[int]:
        """Steps of the local checkpoints, newest first, valid or not."""
        return list_local_steps(self.folder)

    def stored_steps(self) -> list[int]:
        """Steps of the uploaded checkpoints, newest first."""
        return self.stored.steps()

    def latest(self) -> tuple[int, Path] | None:
        """The newest valid checkpoint, from the local folder or else from the store; None when there is none.

        A broken one is named in the log and removed, from the store too, so that it is never mistaken for the latest again
        and takes no valid one's place among those that are kept.
        """
        self.wait_for_commit()
        clean_interrupted_writes(self.folder)
        return self._first_valid(sorted({*self.local_steps(), *self.stored_steps()}, reverse=True))

    def best(self) -> tuple[int, Path] | None:
        """The valid checkpoint with the lowest validation loss; None when no checkpoint was evaluated.

        Of all that the run has come by: one that was sent back may never be as good again as where it went back to.
        """
        self.wait_for_commit()
        clean_interrupted_writes(self.folder)
        known = self._evaluated_checkpoints()
        steps = rank_by_loss({step: loss for step, (loss, _) in known.items()})
        return next((found for step in steps if (found := known[step][1].find_step(step))), None)

    def best_step(self) -> int | None:
        """Its step, by what the manifests say: nothing is fetched or checked."""
        return next(iter(rank_by_loss({step: loss for step, (loss, _) in self._evaluated_checkpoints().items()})), None)

    def _evaluated_checkpoints(self) -> "dict[int, tuple[float | None, CheckpointManager]]":
        """The validation losses of all that the run has come by, with where each checkpoint lies."""
        manager = {}
        if self.origin:
            earlier, branched_at = self.origin
            manager = {step: found for step, found in earlier._evaluated_checkpoints().items() if step <= branched_at}
        return manager | {step: (standing.loss, self) for step, standing in self._qualities().items()}

    def _qualities(self) -> dict[int, CheckpointQuality]:
        """Of those in the store, and of those here."""
        return {step: self.stored.quality(step) for step in self.stored_steps()} | read_local_qualities(self.folder)

    def find_step(self, step: int) -> tuple[int, Path] | None:
        """The checkpoint of `step`, where there is a valid one."""
        self.wait_for_commit()
        clean_interrupted_writes(self.folder)
        return self._first_valid([step])

    def ensure_uploaded(self, step: int) -> None:
        """Have the checkpoint of `step`, which is whole here, in the store: another machine goes on from it too.

        Raises what kept it from there.
        """
        if step not in self.stored_steps():
            self.stored.upload(step, lambda slow: True, self._prune)
            self.stored.wait()

    def ensure_local(self, step: int, content: str) -> None:
        """Have here the checkpoint of `step` that another machine goes on from. What this one has of that step may be other
        weights: those that the run was healed of while it had no part in it.

        Raises:
            Restart: the store has no such checkpoint. That it was broken may have been seen here first: it is offered anew.
        """
        path = self.folder / str(step)
        if read_content_digest(path) != content and part_in_folder(path) is None:
            shutil.rmtree(path, ignore_errors=True)
        if self.find_step(step) is None or read_content_digest(path) != content:
            raise Restart(f"{self.uri}/{step} is not the checkpoint that the first node goes on from")

    def fetch_all_weights(self, found: tuple[int, Path]) -> None:
        """Have all weights of a checkpoint here, of this way or of one before it, whatever other machines have of it.

        Raises:
            Restart: the store has them no more.
        """
        step, path = found
        if self.origin and path.parent != self.folder:
            self.origin[0].fetch_all_weights(found)
        elif (part := part_in_folder(path)) and not self._fetch(step, AllWeights(part.number, part.of, 1)):
            raise Restart(f"{self.uri}/{step} is not in the store: not all of its weights are on this machine")

    def find_rewind_start(self) -> tuple[int, Path] | None:
        """Where the run goes on while it has none here: the checkpoint at which it left those before, of the last that have
        it. None at the beginning.
        """
        manager, branched_at = self, self.origin[1] if self.origin else 0
        while manager.origin:
            manager, _ = manager.origin
            if found := manager.find_step(branched_at):
                return found
        return None

    def discard_from(self, step: int) -> None:
        """Remove the checkpoints of `step` and later, here and in the store: their weights are not to be gone on with."""
        self.wait_for_commit()
        self.stored.drain_uploads()
        remove_steps_from(self.folder, step)
        for bad in self.stored.folders():
            if bad >= step:
                self.stored.delete(bad)

    def _first_valid(self, steps: Iterable[int]) -> tuple[int, Path] | None:
        """The first valid checkpoint of those steps, in their order; the broken ones before it are removed. Parts stay:
        whether others are lost, all machines find out together.
        """
        for step in steps:
            path = self.folder / str(step)
            is_part = part_in_folder(path) is not None
            problem = find_corruption(path, step) if path.is_dir() and not is_part else None
            if problem:
                log_line(f"checkpoint {step} {problem}: falling back")
                shutil.rmtree(path)
            if (path.is_dir() and not is_part) or self._fetch(step, self.share):
                return step, path
            if is_part:
                log_line(f"checkpoint {step} is a part, and others are in no store: falling back")
        return None

    def _fetch(self, step: int, share: NodeShard | None) -> bool:
        """Bring the uploaded checkpoint of `step`, or a share of it, to the local folder. False when it is not there or is
        broken.

        Where that fails, nothing stays of it: on a full disk there was no room left to say why the program ended.
        """
        self.free_disk_space()
        try:
            return self.stored.fetch(step, share)
        except Exception:
            clean_interrupted_writes(self.folder)
            raise
