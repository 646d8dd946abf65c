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

from recipes.checkpoints.commit import broken, content_of, free_bytes, seal, tell
from recipes.checkpoints.disk_space import make_room
from recipes.checkpoints.local import remove_from, standings_in, steps_in, sweep
from recipes.checkpoints.node_parts import PART, part_in
from recipes.checkpoints.remote import StoredCheckpoints
from recipes.checkpoints.retention import Standing, from_the_best, kept
from recipes.checkpoints.shard_selection import Share, Weights
from recipes.runner import Restart, say
from recipes.storage.artifact_store import MANIFEST, Store


class Checkpoints:
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
        before: "tuple[Checkpoints, int] | None" = None,
        free: Callable[[Path], int] = free_bytes,
        share: Share | None = None,
    ) -> None:
        self.folder = folder
        self.store = store
        self.uri = uri
        self.keep_last = keep_last
        self.before = before
        self.share = share
        self._free = free
        self.stored = StoredCheckpoints(folder, store, uri, keep_last, compression)
        self._sealer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-seal")
        self._newest: Future[None] | None = None
        self._waiting: set[int] = set()

    def below(self, name: str, left_at: int = 0) -> "Checkpoints":
        """Checkpoints of their own in a folder below these, which stay as they are: of a run that left these at a step."""
        uri, compression = f"{self.uri}/{name}", self.stored.compression
        below = self.folder / name
        return Checkpoints(below, self.store, uri, self.keep_last, compression, (self, left_at), self._free, self.share)

    @contextmanager
    def writing(
        self,
        step: int,
        facts: Mapping[str, JsonValue] | None = None,
        saying: str | None = None,
        begin_the_rest: Callable[[], "Future[None] | None"] = lambda: None,
        *,
        waits: bool = False,
    ) -> Iterator[Path]:
        """A folder to write into; it becomes the checkpoint of `step` after the block has ended without an error, and after
        what `begin_the_rest` has begun then, which writes into it too.

        `facts` go into its manifest: what `retention.VALIDATION_LOSS` names decides which
        checkpoint is the best. `saying` is for the log, once there is the checkpoint. A part that `waits` is uploaded with
        the next one that does not, or at the end, where it is still the newest or the best.

        Raises what kept the one before from becoming a checkpoint.
        """
        self.settle()
        self.make_room()
        scratch = self.folder / f".{step}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
            rest = begin_the_rest()
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self._newest = self._sealer.submit(self._seal, scratch, step, facts or {}, saying, rest, waits)

    def _seal(
        self,
        scratch: Path,
        step: int,
        facts: Mapping[str, JsonValue],
        saying: str | None,
        rest: "Future[None] | None",
        waits: bool,
    ) -> None:
        try:
            if rest:
                rest.result()
            seal(scratch, self.folder / str(step), facts)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        if saying:
            say(saying)
        if PART not in facts:
            self.stored.upload(step, partial(self._is_wanted, step), self._prune)
        else:
            self._waiting.add(step)
            if not waits:
                self._upload_parts()
        self._prune()

    def _upload_parts(self) -> None:
        """Those that wait, the newest first: nobody removes it here meanwhile. Older ones than these nobody needs."""
        wanted = self._waiting & kept(standings_in(self.folder), 1)
        self._waiting.clear()
        for step in sorted(wanted, reverse=True):
            self.stored.upload(step, partial(self._is_wanted, step), self._prune)

    def is_behind(self) -> bool:
        """Whether what was written before is still on its way to the store.

        Where one machine is, the next part waits on all: each uploaded what was its newest as it came to it, another step
        than the others did, and none was ever whole.
        """
        self.settle()
        return self.stored.is_busy()

    def settle(self) -> None:
        """Wait until what was written is a checkpoint here. Raises what kept it from becoming one, once."""
        newest, self._newest = self._newest, None
        if newest:
            newest.result()

    def notice(self) -> None:
        """Raise what has kept the newest from becoming a checkpoint: the next may be an hour away."""
        if self._newest and self._newest.done():
            self.settle()

    def _kept_locally(self) -> set[int]:
        """Of parts at least two: while this machine has the newest, another may have no more than the one before."""
        standings = standings_in(self.folder)
        in_parts = any(part_in(self.folder / str(step)) for step in standings)
        return kept(standings, max(2, self.keep_last) if in_parts else self.keep_last)

    def _prune(self) -> None:
        """Remove the local checkpoints that do not stay, but for one that is on its way to the store."""
        with self.stored.taking:
            for old in set(self.local_steps()) - self._kept_locally() - {self.stored.busy_with}:
                shutil.rmtree(self.folder / str(old))

    def make_room(self, spared: int | None = None) -> None:
        """Where the disk has none for one more as large as the newest, those go that the store has too, the oldest first.

        The newest stays, and the one that is `spared`.
        """
        make_room(self.folder, self.stored, spared, self._free)

    def _is_wanted(self, step: int, slow: bool) -> bool:
        """Whether a checkpoint is uploaded as its turn comes; where uploads are slow, the newest and the best alone."""
        return step in kept(standings_in(self.folder), 1 if slow else self.keep_last)

    def tell(self, step: int, facts: Mapping[str, JsonValue]) -> None:
        """Add facts to the manifest of the checkpoint of `step`, here and in the background in the store."""
        self.settle()
        if (self.folder / str(step) / MANIFEST).exists():
            tell(self.folder / str(step), facts)
        self.stored.tell(step, facts)

    def catch_up(self) -> None:
        """Upload the newest, and the best of all where it is here, where a kill or the store has cut that off: they would be
        on one machine alone. What a kill has left half there is deleted, and half here.

        For whoever goes on from the newest, which has seen that it is whole.
        """
        self._prune()
        here = self.local_steps()
        missing = kept(self._standings(), 1) - {*self.stored_steps()}
        for step in sorted(missing):
            if step == here[0] or broken(self.folder / str(step), step) is None:
                self.stored.upload(step, partial(self._is_wanted, step), self._prune)
        if not missing:
            self.stored.prune()

    def wait(self) -> None:
        """Wait for the uploads. Raises what the newest one raised: one that failed before it is only named in the log."""
        self.settle()
        self._upload_parts()
        self.stored.wait()

    def close_parts(self) -> None:
        """After the uploads of all machines: what they have saved together is whole, and what does not stay is gone.

        The best of all, which may be in the store alone: what is the best of those here others did not upload for that.

        Raises:
            Restart: of the newest or the best, a part has not arrived; its machine tries again as the run goes on.
        """
        parts = {step for step in self.local_steps() if part_in(self.folder / str(step))}
        if missing := (parts & kept(self._standings(), 1)) - {*self.stored_steps()}:
            raise Restart(f"not all machines' parts of checkpoint {max(missing)} have arrived in the store")
        if parts:
            self.stored.prune()

    def local_steps(self) -> list[int]:
        """Steps of the local checkpoints, newest first, valid or not."""
        return steps_in(self.folder)

    def stored_steps(self) -> list[int]:
        """Steps of the uploaded checkpoints, newest first."""
        return self.stored.steps()

    def latest(self) -> tuple[int, Path] | None:
        """The newest valid checkpoint, from the local folder or else from the store; None when there is none.

        A broken one is named in the log and removed, from the store too, so that it is never mistaken for the latest again
        and takes no valid one's place among those that are kept.
        """
        self.settle()
        sweep(self.folder)
        return self._first_whole(sorted({*self.local_steps(), *self.stored_steps()}, reverse=True))

    def best(self) -> tuple[int, Path] | None:
        """The valid checkpoint with the lowest validation loss; None when no checkpoint was evaluated.

        Of all that the run has come by: one that was sent back may never be as good again as where it went back to.
        """
        self.settle()
        sweep(self.folder)
        known = self._evaluated()
        steps = from_the_best({step: loss for step, (loss, _) in known.items()})
        return next((found for step in steps if (found := known[step][1].at(step))), None)

    def best_step(self) -> int | None:
        """Its step, by what the manifests say: nothing is fetched or checked."""
        return next(iter(from_the_best({step: loss for step, (loss, _) in self._evaluated().items()})), None)

    def _evaluated(self) -> "dict[int, tuple[float | None, Checkpoints]]":
        """The validation losses of all that the run has come by, with where each checkpoint lies."""
        passed = {}
        if self.before:
            earlier, left_at = self.before
            passed = {step: found for step, found in earlier._evaluated().items() if step <= left_at}
        return passed | {step: (standing.loss, self) for step, standing in self._standings().items()}

    def _standings(self) -> dict[int, Standing]:
        """Of those in the store, and of those here."""
        return {step: self.stored.standing(step) for step in self.stored_steps()} | standings_in(self.folder)

    def at(self, step: int) -> tuple[int, Path] | None:
        """The checkpoint of `step`, where there is a valid one."""
        self.settle()
        sweep(self.folder)
        return self._first_whole([step])

    def offer(self, step: int) -> None:
        """Have the checkpoint of `step`, which is whole here, in the store: another machine goes on from it too.

        Raises what kept it from there.
        """
        if step not in self.stored_steps():
            self.stored.upload(step, lambda slow: True, self._prune)
            self.stored.wait()

    def take(self, step: int, content: str) -> None:
        """Have here the checkpoint of `step` that another machine goes on from. What this one has of that step may be other
        weights: those that the run was healed of while it had no part in it.

        Raises:
            Restart: the store has no such checkpoint. That it was broken may have been seen here first: it is offered anew.
        """
        path = self.folder / str(step)
        if content_of(path) != content and part_in(path) is None:
            shutil.rmtree(path, ignore_errors=True)
        if self.at(step) is None or content_of(path) != content:
            raise Restart(f"{self.uri}/{step} is not the checkpoint that the first node goes on from")

    def complete(self, found: tuple[int, Path]) -> None:
        """Have all weights of a checkpoint here, of this way or of one before it, whatever other machines have of it.

        Raises:
            Restart: the store has them no more.
        """
        step, path = found
        if self.before and path.parent != self.folder:
            self.before[0].complete(found)
        elif (part := part_in(path)) and not self._fetch(step, Weights(part.number, part.of, 1)):
            raise Restart(f"{self.uri}/{step} is not in the store: not all of its weights are on this machine")

    def came_from(self) -> tuple[int, Path] | None:
        """Where the run goes on while it has none here: the checkpoint at which it left those before, of the last that have
        it. None at the beginning.
        """
        passed, left_at = self, self.before[1] if self.before else 0
        while passed.before:
            passed, _ = passed.before
            if found := passed.at(left_at):
                return found
        return None

    def discard_from(self, step: int) -> None:
        """Remove the checkpoints of `step` and later, here and in the store: their weights are not to be gone on with."""
        self.settle()
        self.stored.finish()
        remove_from(self.folder, step)
        for bad in self.stored.folders():
            if bad >= step:
                self.stored.delete(bad)

    def _first_whole(self, steps: Iterable[int]) -> tuple[int, Path] | None:
        """The first valid checkpoint of those steps, in their order; the broken ones before it are removed. Parts stay:
        whether others are lost, all machines find out together.
        """
        for step in steps:
            path = self.folder / str(step)
            is_part = part_in(path) is not None
            problem = broken(path, step) if path.is_dir() and not is_part else None
            if problem:
                say(f"checkpoint {step} {problem}: falling back")
                shutil.rmtree(path)
            if (path.is_dir() and not is_part) or self._fetch(step, self.share):
                return step, path
            if is_part:
                say(f"checkpoint {step} is a part, and others are in no store: falling back")
        return None

    def _fetch(self, step: int, share: Share | None) -> bool:
        """Bring the uploaded checkpoint of `step`, or a share of it, to the local folder. False when it is not there or is
        broken.

        Where that fails, nothing stays of it: on a full disk there was no room left to say why the program ended.
        """
        self.make_room()
        try:
            return self.stored.fetch(step, share)
        except Exception:
            sweep(self.folder)
            raise
