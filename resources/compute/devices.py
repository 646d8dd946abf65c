"""What a job has of this machine while it trains or evaluates: one of the places for `jobs_at_once`, and GPUs of its own.
One that waits gets its turn.

Whoever holds the lock of a place or of a GPU has it. A program inherits the locks from its starter (`resources.detached`):
they are free with its last breath, whoever died before it. Dagster's pool does not count so: a program outlives its killed
worker, whose slot is free then, and three trained where two may. On a cluster Kueue and the device plugin do this.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.counted import counted
from recipes.schema import Job, Program
from resources.compute.gpus import installed
from resources.detached import is_running, lock, write_json
from resources.settings_sections import Scheduler

POOL = "gpu"
"""Dagster's, of all that trains or evaluates: no more of it is followed at the same time than `jobs_at_once`."""
PLACE = "place-"
"""Begins the names of folders whose locks are places, beside those of the GPUs."""
ON_GPUS = frozenset({Program.TRAIN, Program.EVALUATE, Program.COMMAND})
FORGOTTEN_SECONDS = 60.0
"""Since somebody asked for the last time: who follows a job asks several times a second."""


@dataclass(frozen=True)
class Granted:
    """GPUs of a job, as `CUDA_VISIBLE_DEVICES` names them, and the descriptors of its locks: theirs, and that of its place.

    Where nothing is said of GPUs, names are none, and a program takes what it finds.
    """

    names: tuple[str, ...] | None = None
    locks: tuple[int, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        return {} if self.names is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.names)}


@dataclass(frozen=True)
class Devices:
    """The GPUs that jobs may have, by name, where any are known, and how many jobs may run at the same time, where that is
    limited. The locks, and who waits for them, lie in a folder.
    """

    folder: Path
    names: tuple[str, ...] | None = None
    places: int | None = None

    def wanted(self, job: Job) -> int:
        """How many a job gets. One that asks for none runs on one all the same, and nobody gets more than there are."""
        if job.program not in ON_GPUS or not self.names:
            return 0
        asked = job.distributed.gpus_per_node if job.distributed else job.hardware.gpus
        return min(max(asked, 1), len(self.names))

    def words(self, job: Job) -> str:
        """What a job waits for."""
        running = self._running()
        if self.places is not None and (running >= self.places or not self.names):
            return f"waits for its turn: on this machine run {running} of at most {counted(self.places, 'job')}"
        return f"waits for GPUs of this machine: {self.wanted(job)} of {len(self.names or ())}"

    def forget(self, job: Job) -> None:
        """Nobody waits for a job any more."""
        self._ticket(job).unlink(missing_ok=True)

    @contextmanager
    def take(self, job: Job) -> Iterator[Granted | None]:
        """What a job may start on; None while it must wait: for others to end, or for those who wait longer.

        The locks are let go with the block, but for those that a program has inherited by then.
        """
        if job.program not in ON_GPUS:
            yield Granted()
            return
        if self.places is None and not self.names:
            yield Granted(self.names)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            asking = held.enter_context(lock(self.folder)) is not None  # one at a time, else two could each take half
            granted = self._free(held, self.wanted(job)) if asking and self._is_next(job) else None
            self._wait(job)  # also one that is to start: should that fail, it keeps its place
            if granted is None:
                held.close()  # a part of what it needs, which others may have, and which would count as theirs
            yield granted
            if granted:
                self.forget(job)

    def _free(self, held: ExitStack, count: int) -> Granted | None:
        """A place and so many GPUs, all at once or none."""
        place = self._place(held)
        if place is None:
            return None
        found: dict[str, int] = {}
        for name in self.names or ():
            if len(found) == count:
                break
            descriptor = self._lock(held, name.replace("/", "_"))
            if descriptor is not None:
                found[name] = descriptor
        if len(found) < count:
            return None
        return Granted(None if self.names is None else tuple(found), (*place, *found.values()))

    def _place(self, held: ExitStack) -> tuple[int, ...] | None:
        """The lock of a place; None where as many jobs run as may, and nothing where any number may."""
        if self.places is None:
            return ()
        if self._running() >= self.places:
            return None
        locks = (self._lock(held, f"{PLACE}{number}") for number in range(self.places))
        return (next(descriptor for descriptor in locks if descriptor is not None),)

    def _running(self) -> int:
        """How many jobs have a place: also those whose place is none any more, since fewer may run by now."""
        return sum(map(is_running, self.folder.glob(f"{PLACE}*")))

    def _lock(self, held: ExitStack, name: str) -> int | None:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return held.enter_context(lock(folder))

    def _ticket(self, job: Job) -> Path:
        return self.folder / f"{hashlib.sha256(job.id.encode()).hexdigest()}.waits"

    def _wait(self, job: Job) -> None:
        """Keeps its place in the queue for a job: what is written says since when, and its time that somebody still asks."""
        ticket = self._ticket(job)
        try:
            os.utime(ticket)
        except FileNotFoundError:
            write_json(ticket, time.time_ns())

    def _is_next(self, job: Job) -> bool:
        """Whether nobody waits longer. A large job would wait for ever, if small ones took each GPU that becomes free."""
        since = {}
        for ticket in self.folder.glob("*.waits"):
            with suppress(FileNotFoundError):  # whoever was cancelled at this moment
                if time.time() - ticket.stat().st_mtime > FORGOTTEN_SECONDS:
                    ticket.unlink()
                else:
                    since[ticket.name] = int(ticket.read_text())
        return not since or min(since, key=lambda name: (since[name], name)) == self._ticket(job).name


def names_of(scheduler: Scheduler) -> tuple[str, ...] | None:
    """The GPUs that jobs may have: those that the settings name, else all of this machine; none where none are known."""
    return tuple(map(str, range(len(installed())))) or None if scheduler.devices is None else scheduler.devices


def jobs_at_once(scheduler: Scheduler) -> int:
    """How many jobs may train or evaluate on this machine at the same time."""
    return min(scheduler.jobs_at_once or len(names_of(scheduler) or "1"), scheduler.max_concurrent_jobs)
