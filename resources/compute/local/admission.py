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
from resources.compute.local.leases import Lease, Leases
from resources.stack.detached_process import lock_folder, write_json_atomic

# On a cluster, Kueue and the device plugin do this.

TICKET_SECONDS = 60.0
"""Age at which a ticket that was not renewed expires: a supervisor polls its job several times a second."""


@dataclass(frozen=True)
class Admission:
    """Queue of jobs waiting for leases: one ticket file per job in the lease folder."""

    leases: Leases

    @contextmanager
    def admit(self, job: Job) -> Iterator[Lease | None]:
        """Lease the slot and GPUs of a job, or yield None while it must wait.

        A job waits for running jobs and for jobs that have waited longer. The locks are released at the end of the block,
        except those that a program has inherited by then.
        """
        if job.program not in GPU_PROGRAMS:
            yield Lease()
            return
        if self.leases.slots is None and not self.leases.gpus:
            yield Lease(self.leases.gpus)
            return
        self.leases.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            # Admit one job at a time: two concurrent ones could each lock half of the GPUs that both need (deadlock).
            is_alone = held.enter_context(lock_folder(self.leases.folder)) is not None
            lease = self.leases.acquire(held, self.required_gpus(job)) if is_alone and self._is_next(job) else None
            self._renew_ticket(job)  # also when admitted: if its start fails, it keeps its place in the queue
            if lease is None:
                held.close()  # release a partial lease, which other jobs could use
            yield lease
            if lease:
                self.withdraw(job)

    def required_gpus(self, job: Job) -> int:
        """Return the number of GPUs that a job gets."""
        return gpus_for(job, self.leases.gpus)

    def describe_wait(self, job: Job) -> str:
        """Describe what a job waits for, for people."""
        running, slots, gpus = self.leases.running_jobs(), self.leases.slots, self.leases.gpus
        if slots is not None and (running >= slots or not gpus):
            return f"waits for its turn: {running} of at most {pluralize(slots, 'job')} on this machine run"
        return f"waits for GPUs of this machine: {self.required_gpus(job)} of {len(gpus or ())}"

    def withdraw(self, job: JobKey) -> None:
        """Remove a job from the queue."""
        self._ticket(job).unlink(missing_ok=True)

    def _ticket(self, job: JobKey) -> Path:
        return self.leases.folder / f"{hashlib.sha256(job.id.encode()).hexdigest()}.waits"

    def _renew_ticket(self, job: JobKey) -> None:
        """Keep the job's place in the queue.

        The content of a ticket is its creation time, the modification time is its last renewal.
        """
        ticket = self._ticket(job)
        try:
            os.utime(ticket)
        except FileNotFoundError:
            write_json_atomic(ticket, time.time_ns())

    def _is_next(self, job: JobKey) -> bool:
        """Return whether no job has waited longer.

        The order is strict: small jobs would otherwise starve a large one of GPUs.
        """
        since = {}
        for ticket in self.leases.folder.glob("*.waits"):
            with suppress(FileNotFoundError):  # withdrawn concurrently
                if time.time() - ticket.stat().st_mtime > TICKET_SECONDS:
                    ticket.unlink()
                else:
                    since[ticket.name] = int(ticket.read_text(encoding="utf-8"))
        return not since or min(since, key=lambda name: (since[name], name)) == self._ticket(job).name
