"""What a launcher offers beyond Dagster's interface where run workers can be lost before they start."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import dagster as dg

# Dagster's run monitor checks the health of started runs alone. A run that is starting it only fails after a time limit,
# although its worker may wait for an image, or be gone.


class RecoverableWorkers(ABC):
    """Workers whose start can be repeated, and whose leftovers can be removed, by run id."""

    @abstractmethod
    def recover_start(self, run: dg.DagsterRun) -> None:
        """Launch a run once more whose worker is missing; fail one whose worker ended before the run started."""

    @abstractmethod
    def remove_leftovers(self, is_over: Callable[[str], bool]) -> list[str]:
        """Remove the workers of runs that are over, and return the ids of these runs."""
