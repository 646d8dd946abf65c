"""The other nodes' side of a gang: connected to the first node, which directs them."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from recipes.contracts.exit_reason import ExitDocument, ExitReason
from recipes.launch.attempt_api import ClaimedAttempt
from recipes.launch.exit_outcome import choose_verdict
from recipes.launch.gang import LOST_END_SECONDS, Gang
from recipes.launch.gang_connection import HANDSHAKE_SECONDS, Connection, PeerLost, PeerRefused, greet_first
from recipes.launch.pod import RENDEZVOUS_SECONDS, Pod
from recipes.launch.rank_progress import RankProgress

RETRY_SECONDS = 1.0


class Member(Gang):
    """A member of a gang. Args as in `Coordinator`."""

    def __init__(self, pod: Pod, log: Callable[[str], None]) -> None:
        super().__init__()
        self._pod, self._log = pod, log
        self._connection: Connection | None = None
        self._verdict: asyncio.Future[ExitDocument] = asyncio.get_running_loop().create_future()
        self._first_lost = ""
        self._unreachable = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def lost_first(self) -> bool:
        """Whether the first node is lost, so that another one must report for the gang."""
        return bool(self._first_lost)

    async def open(self) -> None:
        self._task = asyncio.create_task(self._stay_connected())

    def announce_stop(self, *, preempted: bool) -> None:
        if self.begin_stop(preempted=preempted) and self._connection is not None:
            self._connection.send("stop", preempted=preempted)

    def report_progress(self, ranks: Mapping[int, RankProgress]) -> None:
        if self._connection is not None:
            self._connection.send("progress", ranks={rank: each.model_dump(mode="json") for rank, each in ranks.items()})

    async def agree(self, end: ExitDocument | None) -> ExitDocument:
        if self._connection is None and not self.started.is_set():
            return self._decide_alone(end)
        if self._connection is not None:
            self._connection.send("ended", document=end.model_dump(mode="json") if end else None)
        assert self._task is not None
        waits: set[asyncio.Future[Any]] = {self._verdict, self._task}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return self._verdict.result() if self._verdict.done() else self._decide_alone(end)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.send("goodbye")
            await self._connection.close()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _decide_alone(self, end: ExitDocument | None) -> ExitDocument:
        if self._unreachable:
            end = end or ExitDocument(code=None, message=self._unreachable, reason=ExitReason.RESTART_REQUESTED)
        lost = {0: self._first_lost} if self._first_lost else {}
        return choose_verdict({self._pod.node_rank: end}, lost, leader=0, was_asked_to_stop=self.is_preempted)

    async def _stay_connected(self) -> None:
        """Stay connected until there is a verdict or the first node is lost.

        Before the start, a first node may be replaced.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + RENDEZVOUS_SECONDS
        while not self._verdict.done() and not self._first_lost:
            try:
                await self._follow(await self._connect())
                until = loop.time() + RENDEZVOUS_SECONDS
            except (OSError, PeerLost, PeerRefused, TimeoutError) as error:
                if loop.time() > until:
                    host = f"{self._pod.first_host}:{self._pod.heartbeat_port}"
                    self._unreachable = f"node 0 at {host} did not answer for {RENDEZVOUS_SECONDS} s: {error}"
                    self.ending.set()
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _connect(self) -> Connection:
        pod = self._pod
        opening = asyncio.open_connection(pod.first_host, pod.heartbeat_port)
        connection = Connection(*await asyncio.wait_for(opening, HANDSHAKE_SECONDS))
        try:
            place = {"rank": pod.node_rank, "pod": pod.name, "node": pod.node, "uid": pod.uid, "generation": pod.generation}
            await greet_first(connection, pod.heartbeat_key, **place)
            answer = await asyncio.wait_for(connection.receive(), HANDSHAKE_SECONDS)
            if answer["type"] != "admitted":
                raise PeerRefused(str(answer.get("message")))
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _follow(self, connection: Connection) -> None:
        """Follow the first node's messages until it leaves or is lost."""
        self._connection = connection
        if self.stopping.is_set():
            connection.send("stop", preempted=self.is_preempted)
        try:
            while not self._verdict.done():
                message = await connection.receive()
                match message["type"]:
                    case "attempt":
                        if self.attempt.done():  # the first node was replaced before the start
                            self.attempt = asyncio.get_running_loop().create_future()
                        self.attempt.set_result(ClaimedAttempt(message["number"], message["previous_reason"]))
                    case "start":
                        self.started.set()
                    case "stop":
                        self.begin_stop(preempted=bool(message["preempted"]))
                    case "end":
                        self.end_seconds = min(self.end_seconds, float(message["seconds"]))
                        self.ending.set()
                    case "verdict":
                        self._verdict.set_result(ExitDocument.model_validate(message["document"]))
                    case "goodbye":
                        raise PeerLost("left before the attempt was over")
        except PeerLost as lost:
            if self.started.is_set():
                self._first_lost = f"node 0 ({self._pod.first_host}) {lost}"
                self._log(f"{self._first_lost}: the gang ends")
                self.end_seconds = LOST_END_SECONDS
                self.ending.set()
        if not self._verdict.done():
            self._connection = None
            await connection.close()
