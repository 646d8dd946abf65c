"""Admission of local jobs: first come, first served, with leases of slots and GPUs."""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.contracts.job import Job
from recipes.contracts.quantities import pluralize
from resources.compute.base import JobKey
from resources.compute.local.capacity import GPU_PROGRAMS, gpus_for
from resources.stack.detached_process import is_running, lock_folder, write_json_atomic

# Leases of job slots and GPUs, by lock files.
#
# A lease is held by whoever holds the lock of its folder. A program inherits the locks from the supervisor that starts it
# (`resources.stack.detached_process`), so they are released when its last process ends, whichever supervisor died before.
# Dagster's pool cannot count this: a program outlives its killed run worker, whose pool slot is free then, and three jobs
# trained where two may.

SLOT = "place-"
"""Prefix of the folders whose locks are slots, next to those of the GPUs."""


@dataclass(frozen=True)
class Lease:
    """The GPUs of a job, as `CUDA_VISIBLE_DEVICES` names them, and the descriptors of its locks.

    Where no GPUs are known, `gpus` is None and a program takes what it finds.
    """

    gpus: tuple[str, ...] | None = None
    locks: tuple[int, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


@dataclass(frozen=True)
class Leases:
    """The leases of this machine, in a folder.

    Args:
        gpus: names of the GPUs that jobs may use; None where no GPU is known.
        slots: how many jobs may run at the same time; None for no limit.
    """

    folder: Path
    gpus: tuple[str, ...] | None = None
    slots: int | None = None

    def acquire(self, held: ExitStack, gpu_count: int) -> Lease | None:
        """Lease a slot and GPUs, all or nothing. `held` releases the locks, except those that a program has inherited."""
        slot = self._acquire_slot(held)
        if slot is None:
            return None
        found: dict[str, int] = {}
        for name in self.gpus or ():
            if len(found) == gpu_count:
                break
            descriptor = self._lock(held, name.replace("/", "_"))
            if descriptor is not None:
                found[name] = descriptor
        if len(found) < gpu_count:
            return None
        return Lease(None if self.gpus is None else tuple(found), (*slot, *found.values()))

    def running_jobs(self) -> int:
        """How many jobs hold a slot, also a slot beyond a limit that was lowered since."""
        return sum(map(is_running, self.folder.glob(f"{SLOT}*")))

    def _acquire_slot(self, held: ExitStack) -> tuple[int, ...] | None:
        """The lock of a slot; None where all are taken, and an empty tuple where there is no limit."""
        if self.slots is None:
            return ()
        if self.running_jobs() >= self.slots:
            return None
        locks = (self._lock(held, f"{SLOT}{number}") for number in range(self.slots))
        return (next(descriptor for descriptor in locks if descriptor is not None),)

    def _lock(self, held: ExitStack, name: str) -> int | None:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return held.enter_context(lock_folder(folder))


# Admission of jobs to this machine: first come, first served, for a slot and GPUs.
#
# On a cluster, Kueue and the device plugin do this.

TICKET_SECONDS = 60.0
"""A ticket that was not renewed for so long is dropped: a supervisor polls its job several times a second."""


@dataclass(frozen=True)
class Admission:
    """The queue of jobs that wait for `leases`: a ticket file per job in the folder of the leases."""

    leases: Leases

    @contextmanager
    def admit(self, job: Job) -> Iterator[Lease | None]:
        """Lease what a job needs, or None while it must wait: for running jobs, or for jobs that wait longer.

        The locks are released with the block, except those that a program has inherited by then.
        """
        if job.program not in GPU_PROGRAMS:
            yield Lease()
            return
        if self.leases.slots is None and not self.leases.gpus:
            yield Lease(self.leases.gpus)
            return
        self.leases.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            # One job at a time: two at once could each lock half of what both need.
            is_alone = held.enter_context(lock_folder(self.leases.folder)) is not None
            lease = self.leases.acquire(held, self.required_gpus(job)) if is_alone and self._is_next(job) else None
            self._renew_ticket(job)  # also when admitted: if its start fails, it keeps its place in the queue
            if lease is None:
                held.close()  # release a partial lease, which other jobs could use
            yield lease
            if lease:
                self.withdraw(job)

    def required_gpus(self, job: Job) -> int:
        """How many GPUs a job gets."""
        return gpus_for(job, self.leases.gpus)

    def describe_wait(self, job: Job) -> str:
        """What a job waits for, for people."""
        running, slots, gpus = self.leases.running_jobs(), self.leases.slots, self.leases.gpus
        if slots is not None and (running >= slots or not gpus):
            return f"waits for its turn: on this machine run {running} of at most {pluralize(slots, 'job')}"
        return f"waits for GPUs of this machine: {self.required_gpus(job)} of {len(gpus or ())}"

    def withdraw(self, job: JobKey) -> None:
        """Remove a job from the queue."""
        self._ticket(job).unlink(missing_ok=True)

    def _ticket(self, job: JobKey) -> Path:
        return self.leases.folder / f"{hashlib.sha256(job.id.encode()).hexdigest()}.waits"

    def _renew_ticket(self, job: JobKey) -> None:
        """Keep the job's place: the content of a ticket is when it was made, its modification time when it was renewed."""
        ticket = self._ticket(job)
        try:
            os.utime(ticket)
        except FileNotFoundError:
            write_json_atomic(ticket, time.time_ns())

    def _is_next(self, job: JobKey) -> bool:
        """Whether no job waits longer. Strict order: small jobs would otherwise take every GPU that a large one needs."""
        since = {}
        for ticket in self.leases.folder.glob("*.waits"):
            with suppress(FileNotFoundError):  # withdrawn at this moment
                if time.time() - ticket.stat().st_mtime > TICKET_SECONDS:
                    ticket.unlink()
                else:
                    since[ticket.name] = int(ticket.read_text())
        return not since or min(since, key=lambda name: (since[name], name)) == self._ticket(job).name
