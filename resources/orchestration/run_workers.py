"""Interface of launchers whose run workers can be lost before they start."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import dagster as dg

# Dagster's run monitor checks the health of started runs only. A starting run only fails after a time limit, although its
# worker may be waiting for an image, or be gone.


class RecoverableWorkers(ABC):
    """Workers whose start can be repeated, and whose leftovers can be removed, by run id."""

    @abstractmethod
    def recover_start(self, run: dg.DagsterRun) -> None:
        """Relaunch a run without worker; fail one whose worker ended before the run started."""

    @abstractmethod
    def remove_leftovers(self, is_over: Callable[[str], bool]) -> list[str]:
        """Remove the workers of finished runs, and return the ids of these runs."""
