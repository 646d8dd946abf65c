"""Leases of job slots and GPUs, by lock files.

Holding a lease means holding the lock of its folder. A program inherits the locks from the supervisor that starts it
(`resources.stack.detached_process`), so they are released when its last process ends, even if its supervisor died before.
A Dagster pool cannot enforce this: a program outlives its killed run worker, whose pool slot is then free, and three jobs
trained where two were allowed.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from resources.stack.detached_process import is_running, lock_folder

SLOT = "place-"
"""Prefix of the folders whose locks are slots, next to those of the GPUs."""


@dataclass(frozen=True)
class Lease:
    """GPUs of a job, named as in `CUDA_VISIBLE_DEVICES`, and its lock descriptors.

    If no GPUs are known, `gpus` is None and the program uses what it finds.
    """

    gpus: tuple[str, ...] | None = None
    locks: tuple[int, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


@dataclass(frozen=True)
class Leases:
    """Leases of this machine, in a folder.

    Args:
        gpus: names of the GPUs that jobs may use; None if no GPU is known.
        slots: maximum number of concurrent jobs; None for no limit.
    """

    folder: Path
    gpus: tuple[str, ...] | None = None
    slots: int | None = None

    def acquire(self, held: ExitStack, gpu_count: int) -> Lease | None:
        """Lease a slot and GPUs, all or nothing.

        `held` releases the locks, except those that a program has inherited.
        """
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
        """Return how many jobs hold a slot, including slots above a since lowered limit."""
        return sum(map(is_running, self.folder.glob(f"{SLOT}*")))

    def _acquire_slot(self, held: ExitStack) -> tuple[int, ...] | None:
        """Lock a free slot; None if all are held, an empty tuple without a limit."""
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
