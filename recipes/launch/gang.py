"""One node's view of its gang: start together, stop together, agree on the exit reason.

A star topology: every node is connected to the first one, which starts the programs once all nodes have joined, forwards
announcements, and decides on the exit reason from all reports. All pods of a gang exit with the same code.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from recipes.contracts.exit_reason import ExitDocument
from recipes.launch.attempt_api import ClaimedAttempt
from recipes.launch.rank_progress import RankProgress

ERROR_END_SECONDS = 30.0
"""Time for programs to end by themselves after one failed: they may still write their error."""
LOST_END_SECONDS = 8.0
"""The same after a node was lost: the programs are blocked in a collective and have nothing to write."""

T = TypeVar("T")


class GangEnded(Exception):
    """The gang stopped or ended while this node was waiting."""


class Gang(ABC):
    """State of a gang. Events are set once and stay set.

    Attributes:
        stopping: all programs save and stop; `is_preempted` if a pod received a stop request, rather than a program failing.
        ending: the programs cannot continue and are ended within `end_seconds`.
    """

    def __init__(self) -> None:
        self.attempt: asyncio.Future[ClaimedAttempt] = asyncio.get_running_loop().create_future()
        self.started = asyncio.Event()
        self.stopping = asyncio.Event()
        self.ending = asyncio.Event()
        self.is_preempted = False
        self.end_seconds = ERROR_END_SECONDS

    @abstractmethod
    async def open(self) -> None:
        """Listen for members, or start connecting to the first node."""

    def begin_stop(self, *, preempted: bool) -> bool:
        """Mark the gang as stopping and return whether it was running until now.

        A gang that ends already is not stopped: a cluster stops all pods when one has failed.
        """
        if self.stopping.is_set() or self.ending.is_set():
            return False
        self.is_preempted = preempted
        self.stopping.set()
        return True

    @abstractmethod
    def announce_stop(self, *, preempted: bool) -> None:
        """Make the whole gang save and stop.

        Called after a stop request or a failure of this pod's program.
        """

    @abstractmethod
    def report_progress(self, ranks: Mapping[int, RankProgress]) -> None:
        """Report the progress of this node's processes; called periodically."""

    @abstractmethod
    async def agree(self, end: ExitDocument | None) -> ExitDocument:
        """Report how this node's program ended and wait for the verdict.

        None: it ended only because it was killed with the gang.
        """

    @abstractmethod
    async def close(self) -> None:
        """Leave the gang in order."""

    async def wait_unless_ended(self, awaitable: Awaitable[T]) -> T:
        """Wait for `awaitable`.

        Raises:
            GangEnded: the gang stops or ends first.
        """
        wanted = asyncio.ensure_future(awaitable)
        events = [asyncio.create_task(event.wait()) for event in (self.stopping, self.ending)]
        try:
            await asyncio.wait({wanted, *events}, return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                raise GangEnded
            return wanted.result()
        finally:
            unfinished = [task for task in (wanted, *events) if not task.done()]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
