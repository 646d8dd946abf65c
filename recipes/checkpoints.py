"""Checkpoints that can be trusted: temporary name, manifest with SHA-256 last, rename, upload, retention.

It happens while training goes on, locally first. A checkpoint without a valid manifest does not exist (specification row
I15): loading falls back to the one before it and says so. The last few stay, and the best beside them (rows I1, I7). What is
inside a checkpoint is the trainer's business.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from recipes.checkpoint_compression import decompress, is_compressed
from recipes.checkpoint_folder import broken, finish, seal, tell
from recipes.retention import Standing, from_the_best, kept, standing_of
from recipes.runner import say
from recipes.store import MANIFEST, BrokenArtifact, Store
from recipes.stored_checkpoints import StoredCheckpoints

DOWNLOAD = ".download"


class Checkpoints:
    """The checkpoints of one run: a local folder with one folder a step, mirrored below a logical URI.

    Args:
        folder: local; survives a restart on the same machine.
        store, uri: where uploads go, and where a new machine finds them.
        keep_last: how many of the newest stay, locally and in the store, besides the best one.
        compression: of what is uploaded.
        before: those that the run has come from, and the step at which it left them.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        uri: str,
        keep_last: int,
        compression: Literal["zstd"] | None = None,
        before: "tuple[Checkpoints, int] | None" = None,
    ) -> None:
        self.folder = folder
        self.store = store
        self.uri = uri
        self.keep_last = keep_last
        self.before = before
        self.stored = StoredCheckpoints(folder, store, uri, keep_last, compression)
        self._sealer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-seal")
        self._newest: Future[None] | None = None

    def below(self, name: str, left_at: int = 0) -> "Checkpoints":
        """Checkpoints of their own in a folder below these, which stay as they are: of a run that left these at a step."""
        compression, before = self.stored.compression, (self, left_at)
        return Checkpoints(self.folder / name, self.store, f"{self.uri}/{name}", self.keep_last, compression, before)

    @contextmanager
    def writing(
        self,
        step: int,
        facts: Mapping[str, JsonValue] | None = None,
        saying: str | None = None,
        begin_the_rest: Callable[[], "Future[None] | None"] = lambda: None,
    ) -> Iterator[Path]:
        """A folder to write into; it becomes the checkpoint of `step` after the block has ended without an error, and after
        what `begin_the_rest` has begun then, which writes into it too.

        `facts` go into its manifest: what `retention.VALIDATION_LOSS` names decides which
        checkpoint is the best. `saying` is for the log, once there is the checkpoint.

        Raises what kept the one before from becoming a checkpoint.
        """
        self.settle()
        scratch = self.folder / f".{step}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
            rest = begin_the_rest()
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self._newest = self._sealer.submit(self._seal, scratch, step, facts or {}, saying, rest)

    def _seal(
        self, scratch: Path, step: int, facts: Mapping[str, JsonValue], saying: str | None, rest: "Future[None] | None"
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
        self.stored.upload(step, partial(self._is_wanted, step), self._prune)
        self._prune()

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
        return kept(self._local_standings(), self.keep_last)

    def _prune(self) -> None:
        """Remove the local checkpoints that do not stay, but for one that is on its way to the store."""
        with self.stored.taking:
            for old in set(self.local_steps()) - self._kept_locally() - {self.stored.busy_with}:
                shutil.rmtree(self.folder / str(old))

    def _is_wanted(self, step: int, slow: bool) -> bool:
        """Whether a checkpoint is uploaded as its turn comes; where uploads are slow, the newest and the best alone."""
        return step in kept(self._local_standings(), 1 if slow else self.keep_last)

    def tell(self, step: int, facts: Mapping[str, JsonValue]) -> None:
        """Add facts to the manifest of the checkpoint of `step`, here and in the background in the store."""
        self.settle()
        if (self.folder / str(step) / MANIFEST).exists():
            tell(self.folder / str(step), facts)
        self.stored.tell(step, facts)

    def catch_up(self) -> None:
        """Upload the best and the newest of those here, where a kill or the store has cut that off: they would be on one
        machine alone. What a kill has left half there is deleted, and half here.

        For whoever goes on from the newest, which has seen that it is whole.
        """
        self._prune()
        here = self.local_steps()
        missing = kept(self._local_standings(), 1) - {*self.stored_steps()}
        for step in sorted(missing):
            if step == here[0] or broken(self.folder / str(step), step) is None:
                self.stored.upload(step, partial(self._is_wanted, step), self._prune)
        if not missing:
            self.stored.prune()

    def wait(self) -> None:
        """Wait for the uploads. Raises what the newest one raised: one that failed before it is only named in the log."""
        self.settle()
        self.stored.wait()

    def local_steps(self) -> list[int]:
        """Steps of the local checkpoints, newest first, valid or not."""
        names = (path.name for path in self.folder.iterdir()) if self.folder.is_dir() else iter(())
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def stored_steps(self) -> list[int]:
        """Steps of the uploaded checkpoints, newest first."""
        return self.stored.steps()

    def latest(self) -> tuple[int, Path] | None:
        """The newest valid checkpoint, from the local folder or else from the store; None when there is none.

        A broken one is named in the log and removed, from the store too, so that it is never mistaken for the latest again
        and takes no valid one's place among those that are kept.
        """
        self.settle()
        self._sweep()
        return self._first_whole(sorted({*self.local_steps(), *self.stored_steps()}, reverse=True))

    def best(self) -> tuple[int, Path] | None:
        """The valid checkpoint with the lowest validation loss; None when no checkpoint was evaluated.

        Of all that the run has come by: one that was sent back may never be as good again as where it went back to.
        """
        self.settle()
        self._sweep()
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
        known = {step: self.stored.standing(step) for step in self.stored_steps()} | self._local_standings()
        return passed | {step: (standing.loss, self) for step, standing in known.items()}

    def at(self, step: int) -> tuple[int, Path] | None:
        """The checkpoint of `step`, where there is a valid one."""
        self.settle()
        self._sweep()
        return self._first_whole([step])

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
        for bad in self.local_steps():
            if bad >= step:
                shutil.rmtree(self.folder / str(bad))
        for bad in self.stored_steps():
            if bad >= step:
                self.stored.delete(bad)

    def _local_standings(self) -> dict[int, Standing]:
        return {step: self._local_standing(step) for step in self.local_steps()}

    def _local_standing(self, step: int) -> Standing:
        try:
            return standing_of((self.folder / str(step) / MANIFEST).read_bytes())
        except FileNotFoundError:
            return Standing()

    def _first_whole(self, steps: Iterable[int]) -> tuple[int, Path] | None:
        """The first valid checkpoint of those steps, in their order; the broken ones before it are removed."""
        for step in steps:
            path = self.folder / str(step)
            problem = broken(path, step) if path.is_dir() else "is not on this machine"
            if problem and path.is_dir():
                say(f"checkpoint {step} {problem}: falling back")
                shutil.rmtree(path)
            if problem and not self._restore(step):
                continue
            return step, path
        return None

    def _sweep(self) -> None:
        """Remove what a process that was killed left half written or half downloaded: nothing is being written meanwhile.

        What was whole and lacked nothing but its name gets it.
        """
        for path in (*self.folder.glob(".*.tmp"), self.folder / DOWNLOAD):
            step = path.name[1 : -len(".tmp")]
            if step.isdigit() and finish(path, self.folder / step):
                say(f"checkpoint {step} was whole, and has its name now")
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _restore(self, step: int) -> bool:
        """Bring the uploaded checkpoint of `step` to the local folder. False when it is not there or is broken.

        Where that fails, nothing stays of it: on a full disk there was no room left to say why the program ended.
        """
        try:
            return self._bring(step)
        except Exception:
            self._sweep()
            raise

    def _bring(self, step: int) -> bool:
        uri = f"{self.uri}/{step}"
        if not self.store.exists(uri):
            return False
        try:
            artifact = self.store.find(uri)
            if artifact is None:
                raise BrokenArtifact(f"{uri} has no readable manifest")
            source = self.store.fetch(artifact, self.folder / DOWNLOAD)
        except BrokenArtifact as error:
            say(f"uploaded checkpoint {step} is broken ({error}): falling back")
            self.store.delete(uri)
            return False
        scratch = self.folder / f".{step}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        manifest = self.store.manifest(artifact)
        if is_compressed(manifest):
            manifest = decompress(source, manifest, scratch)
        elif source.is_relative_to(self.folder):
            os.replace(source, scratch)  # it was downloaded; else it lies in the store itself
        else:
            shutil.copytree(source, scratch)
        (scratch / MANIFEST).write_bytes(manifest.to_bytes())
        os.replace(scratch, self.folder / str(step))
        shutil.rmtree(self.folder / DOWNLOAD, ignore_errors=True)
        say(f"checkpoint {step} restored from {uri}")
        return True
