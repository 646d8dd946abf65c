"""Durable checkpoints: temporary folder, manifest with SHA-256 last, rename, upload, retention.

All in the background, locally first. A checkpoint without a valid manifest does not exist: loading falls back to the
previous one and logs it. The last few are kept, and the best. The content of a checkpoint is defined by the trainer.
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
    """The checkpoints of one run or branch.

    A local folder with one folder per step, mirrored to the store.

    Args:
        folder: local folder; survives a restart on the same machine.
        store, uri: destination of uploads, from which new machines resume.
        keep_last: number of newest checkpoints to keep locally and in the store, in addition to the best.
        compression: format of uploads.
        origin: the previous branch, and the step at which the run left it.
        share: part of a checkpoint that this machine fetches; None for all.
        free: returns the free bytes of a folder's disk.
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
        """Return the manager of a branch in a subfolder.

        The run left these checkpoints at `branched_at`; they are kept.
        """
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
        """Yield a folder that becomes the checkpoint of `step` if the block succeeds.

        The commit waits for the future that `start_remaining_writes` returns, which may still write to the folder.

        Args:
            facts: manifest facts; `retention.VALIDATION_LOSS_KEY` determines the best checkpoint.
            log_message: logged after the commit.
            defer_upload: upload this part with the next one that is not deferred, or at the end, if it is still the newest
                or the best.

        Raises the error of the previous commit, if it failed.
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
        """Upload deferred parts, newest first, which must not be removed meanwhile.

        Older parts are not needed.
        """
        selected = self._deferred_parts & select_kept_steps(read_local_qualities(self.folder), 1)
        self._deferred_parts.clear()
        for step in sorted(selected, reverse=True):
            self.stored.upload(step, partial(self._should_upload, step), self._prune)

    def has_pending_uploads(self) -> bool:
        """Return whether earlier checkpoints are still being uploaded.

        If any machine has pending uploads, all defer their next part: otherwise each uploaded its own newest one, at
        different steps, and no checkpoint was ever complete.
        """
        self.wait_for_commit()
        return self.stored.has_pending_uploads()

    def wait_for_commit(self) -> None:
        """Wait for the pending commit. Raises its error, once."""
        newest, self._pending_commit = self._pending_commit, None
        if newest:
            newest.result()

    def raise_if_failed(self) -> None:
        """Raise the error of a failed commit now.

        The next checkpoint may be an hour away.
        """
        if self._pending_commit and self._pending_commit.done():
            self.wait_for_commit()

    def _kept_locally(self) -> set[int]:
        """Return the steps to keep locally.

        Of parts at least two, because other machines may still lack the newest.
        """
        standings = read_local_qualities(self.folder)
        has_parts = any(part_in_folder(self.folder / str(step)) for step in standings)
        return select_kept_steps(standings, max(2, self.keep_last) if has_parts else self.keep_last)

    def _prune(self) -> None:
        """Remove local checkpoints that are not kept, except one that is being uploaded."""
        with self.stored.removal_lock:
            for old in set(self.local_steps()) - self._kept_locally() - {self.stored.uploading_step}:
                shutil.rmtree(self.folder / str(old))

    def free_disk_space(self, kept_step: int | None = None) -> None:
        """Free disk space for one more checkpoint by removing local copies of stored ones.

        The newest and `kept_step` are kept.
        """
        free_disk_space(self.folder, self.stored, kept_step, self._free_bytes)

    def _should_upload(self, step: int, slow: bool) -> bool:
        """Return whether to upload a checkpoint at its turn.

        With slow uploads only the newest and the best.
        """
        return step in select_kept_steps(read_local_qualities(self.folder), 1 if slow else self.keep_last)

    def update_metadata(self, step: int, facts: Mapping[str, JsonValue]) -> None:
        """Add facts to a checkpoint's manifest, locally now and in the store in the background."""
        self.wait_for_commit()
        if (self.folder / str(step) / MANIFEST_FILE).exists():
            update_metadata(self.folder / str(step), facts)
        self.stored.update_metadata(step, facts)

    def upload_missing(self) -> None:
        """Upload the newest and the best local checkpoint if the store lacks them.

        An interrupted upload may have left them on this machine only.

        Partial checkpoints in the store and local ones are deleted. Called when the newest has been verified for resuming.
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
        """Wait for uploads.

        Raises the newest upload's error; errors of earlier ones are only logged.
        """
        self.wait_for_commit()
        self._upload_parts()
        self.stored.wait()

    def require_complete_parts(self) -> None:
        """Check that checkpoints saved by all machines are complete, after their uploads; then prune.

        The best one may be in the store only: the best local one was not uploaded by others then.

        Raises:
            Restart: a part of the newest or the best is missing; its machine retries at the restart.
        """
        parts = {step for step in self.local_steps() if part_in_folder(self.folder / str(step))}
        if missing := (parts & select_kept_steps(self._qualities(), 1)) - {*self.stored_steps()}:
            raise Restart(f"not all machines' parts of checkpoint {max(missing)} have arrived in the store")
        if parts:
            self.stored.prune()

    def local_steps(self) -> list[int]:
        """List local steps, newest first, valid or not."""
        return list_local_steps(self.folder)

    def stored_steps(self) -> list[int]:
        """List uploaded steps, newest first."""
        return self.stored.steps()

    def latest(self) -> tuple[int, Path] | None:
        """Return the newest valid checkpoint, local or fetched from the store, or None.

        Corrupt ones are logged and removed, from the store too, so that they neither count as the latest again nor displace
        valid ones.
        """
        self.wait_for_commit()
        clean_interrupted_writes(self.folder)
        return self._first_valid(sorted({*self.local_steps(), *self.stored_steps()}, reverse=True))

    def best(self) -> tuple[int, Path] | None:
        """Return the valid checkpoint with the lowest validation loss, or None if none was evaluated.

        Includes earlier branches up to where the run left them: after a rewind it may never be as good again.
        """
        self.wait_for_commit()
        clean_interrupted_writes(self.folder)
        known = self._evaluated_checkpoints()
        steps = rank_by_loss({step: loss for step, (loss, _) in known.items()})
        return next((found for step in steps if (found := known[step][1].find_step(step))), None)

    def best_step(self) -> int | None:
        """Return the best checkpoint's step according to manifests, without fetching or verifying."""
        return next(iter(rank_by_loss({step: loss for step, (loss, _) in self._evaluated_checkpoints().items()})), None)

    def _evaluated_checkpoints(self) -> "dict[int, tuple[float | None, CheckpointManager]]":
        """Return validation losses and managers of all steps in the run's history."""
        manager = {}
        if self.origin:
            earlier, branched_at = self.origin
            manager = {step: found for step, found in earlier._evaluated_checkpoints().items() if step <= branched_at}
        return manager | {step: (standing.loss, self) for step, standing in self._qualities().items()}

    def _qualities(self) -> dict[int, CheckpointQuality]:
        """Return the qualities of stored and local checkpoints by step."""
        return {step: self.stored.quality(step) for step in self.stored_steps()} | read_local_qualities(self.folder)

    def find_step(self, step: int) -> tuple[int, Path] | None:
        """Return the checkpoint of `step` if it is valid."""
        self.wait_for_commit()
        clean_interrupted_writes(self.folder)
        return self._first_valid([step])

    def ensure_uploaded(self, step: int) -> None:
        """Upload the checkpoint of `step` if the store lacks it.

        Other machines can then resume from it. Raises the error of the upload.
        """
        if step not in self.stored_steps():
            self.stored.upload(step, lambda slow: True, self._prune)
            self.stored.wait()

    def ensure_local(self, step: int, content: str) -> None:
        """Fetch the checkpoint of `step` with this content unless it is here.

        This machine's checkpoint of the same step may have other weights, which the run discarded while the machine was
        away.

        Raises:
            Restart: the store has no such checkpoint. If corruption was first detected here, the leader uploads it again.
        """
        path = self.folder / str(step)
        if read_content_digest(path) != content and part_in_folder(path) is None:
            shutil.rmtree(path, ignore_errors=True)
        if self.find_step(step) is None or read_content_digest(path) != content:
            raise Restart(f"{self.uri}/{step} is not the checkpoint that the first node resumes from")

    def fetch_all_weights(self, found: tuple[int, Path]) -> None:
        """Fetch all weights of a checkpoint on this or an earlier branch.

        Raises:
            Restart: the store no longer has them.
        """
        step, path = found
        if self.origin and path.parent != self.folder:
            self.origin[0].fetch_all_weights(found)
        elif (part := part_in_folder(path)) and not self._fetch(step, AllWeights(part.number, part.of, 1)):
            raise Restart(f"{self.uri}/{step} is not in the store: not all of its weights are on this machine")

    def find_rewind_start(self) -> tuple[int, Path] | None:
        """Return the checkpoint from the previous branch that this one starts from.

        Searches all earlier branches; None at the start of a run.
        """
        manager, branched_at = self, self.origin[1] if self.origin else 0
        while manager.origin:
            manager, _ = manager.origin
            if found := manager.find_step(branched_at):
                return found
        return None

    def discard_from(self, step: int) -> None:
        """Remove checkpoints of `step` and later, locally and in the store.

        Their weights must not be used.
        """
        self.wait_for_commit()
        self.stored.drain_uploads()
        remove_steps_from(self.folder, step)
        for bad in self.stored.folders():
            if bad >= step:
                self.stored.delete(bad)

    def _first_valid(self, steps: Iterable[int]) -> tuple[int, Path] | None:
        """Return the first valid checkpoint of these steps, removing corrupt ones before it.

        Parts are kept: all machines determine together whether other parts are lost.
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
                log_line(f"checkpoint {step} is a part whose other parts are not in the store: falling back")
        return None

    def _fetch(self, step: int, share: NodeShard | None) -> bool:
        """Fetch the uploaded checkpoint of `step`, or a share of it.

        Return False if it is missing or corrupt. After a failure nothing of it is left: on a full disk there was no room to
        record why the program ended.
        """
        self.free_disk_space()
        try:
            return self.stored.fetch(step, share)
        except Exception:
            clean_interrupted_writes(self.folder)
            raise
