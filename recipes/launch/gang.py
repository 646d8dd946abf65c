"""One node's view of its gang: begin together, stop together, and agree on why the attempt ended.

A star: every node is connected to the first one, which starts the programs once all nodes are there, passes on what one of
them announces, and decides on the exit reason from what all report. All pods of a gang exit with the same code.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from recipes.contracts.exit_reason import ExitDocument
from recipes.launch.attempt_api import ClaimedAttempt
from recipes.launch.rank_progress import RankProgress

ERROR_END_SECONDS = 30.0
"""Time for programs to end by themselves after one has failed: it may still write what it knows."""
LOST_END_SECONDS = 8.0
"""The same after a node was lost: the programs wait for it in a collective, and have nothing to write."""

T = TypeVar("T")


class GangEnded(Exception):
    """The gang stopped or ended while this node waited for something."""


class Gang(ABC):
    """What the gang knows. Events are set once and stay set.

    `stopping`: all programs save and stop; `is_preempted` if a pod was asked to, and not because a program has failed.
    `ending`: they cannot go on and are ended, within `end_seconds`.
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
        """Listen for the others, or begin to look for the first node."""

    def begin_stop(self, *, preempted: bool) -> bool:
        """Returns whether it begins now. Once a gang ends, that counts: a cluster stops all pods when one has failed."""
        if self.stopping.is_set() or self.ending.is_set():
            return False
        self.is_preempted = preempted
        self.stopping.set()
        return True

    @abstractmethod
    def announce_stop(self, *, preempted: bool) -> None:
        """This pod was asked to stop, or its program has failed, so the whole gang saves and stops."""

    @abstractmethod
    def report_progress(self, ranks: Mapping[int, RankProgress]) -> None:
        """How far the processes of this node have come; called periodically."""

    @abstractmethod
    async def agree(self, end: ExitDocument | None) -> ExitDocument:
        """Report how this node's program ended, and wait for the verdict. None: only because it was ended."""

    @abstractmethod
    async def close(self) -> None:
        """Say goodbye."""

    async def wait_unless_ended(self, awaitable: Awaitable[T]) -> T:
        """Raises GangEnded: the gang stops or ends first."""
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
