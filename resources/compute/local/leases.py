"""Leases of job slots and GPUs, by lock files.

A lease is held by whoever holds the lock of its folder. A program inherits the locks from the supervisor that starts it
(`resources.stack.detached_process`), so they are released when its last process ends, whichever supervisor died before.
Dagster's pool cannot count this: a program outlives its killed run worker, whose pool slot is free then, and three jobs
trained where two may.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from resources.stack.detached_process import is_running, lock_folder

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
