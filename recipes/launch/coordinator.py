"""The first node's side of a gang: admit and watch members, decide the exit reason."""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from recipes.contracts.exit_reason import ExitDocument, ExitReason
from recipes.contracts.quantities import parse_duration
from recipes.launch.attempt_api import ClaimedAttempt
from recipes.launch.exit_outcome import choose_verdict
from recipes.launch.gang import ERROR_END_SECONDS, LOST_END_SECONDS, Gang
from recipes.launch.gang_connection import GOODBYE_SECONDS, Connection, Message, PeerLost, PeerRefused, accept_member
from recipes.launch.pod import Pod
from recipes.launch.rank_progress import RankProgress
from recipes.launch.stall_watch import StallWatch

ORDERLY_REASONS = (ExitReason.COMPLETED, ExitReason.PREEMPTED)
"""Exit reasons that the programs of the other nodes reach by themselves."""
KILL_REASONS = (ExitReason.KILLED, ExitReason.OOM_KILLED)
"""Exit reasons of a rank for which the others wait in a collective, as they do for a lost node."""
OTHERS_SECONDS = 300.0
"""How long the first node waits for the others after its own program has ended, unless the grace period is longer."""


@dataclass(frozen=True)
class Member:
    """Another node of the gang and its connection."""

    rank: int
    name: str
    connection: Connection


class Coordinator(Gang):
    """Coordinates a gang; a gang of one does not listen for members.

    Args:
        num_nodes: size of the gang; 1 for pods that work independently.
        grace_seconds: period in which the gang's pods may save and stop.
        stall_limit: how long its processes may make no progress, as in the job's `schedule`.
        log: writes a line to the job's log.
    """

    def __init__(self, pod: Pod, num_nodes: int, grace_seconds: float, stall_limit: str, log: Callable[[str], None]) -> None:
        super().__init__()
        self._stall_limit, self._stall_watch = stall_limit, StallWatch(parse_duration(stall_limit))
        self._stalled = ""
        self._pod, self._num_nodes, self._grace_seconds, self._log = pod, num_nodes, grace_seconds, log
        self._members: dict[int, Member] = {}
        self._ends: dict[int, ExitDocument | None] = {}
        self._lost: dict[int, str] = {}
        self._verdict: ExitDocument | None = None
        self._settled = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._left = asyncio.Event()

    async def open(self) -> None:
        if self._num_nodes > 1:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listener = socket.create_server(("", self._pod.heartbeat_port), family=family, dualstack_ipv6=dual)
            self._server = await asyncio.start_server(self._serve, sock=listener)

    def set_attempt(self, attempt: ClaimedAttempt) -> None:
        """Set the attempt that this gang runs; programs start once all nodes have joined."""
        self.attempt.set_result(attempt)
        for member in self._members.values():
            send_attempt(member.connection, attempt)
        self._start_if_complete()

    def missing_nodes(self) -> list[int]:
        return [rank for rank in range(1, self._num_nodes) if rank not in self._members]

    def announce_stop(self, *, preempted: bool) -> None:
        if self.begin_stop(preempted=preempted):
            self._broadcast("stop", preempted=preempted)

    def report_progress(self, ranks: Mapping[int, RankProgress]) -> None:
        self._stall_watch.report(self._pod.node_rank, ranks)
        stalled = self._stall_watch.find_stalled(asyncio.get_running_loop().time())
        if stalled is not None and not self.ending.is_set() and not self.stopping.is_set():
            self._record_stall(stalled)

    async def agree(self, end: ExitDocument | None) -> ExitDocument:
        self._record_end(self._pod.node_rank, end)
        await self._wait_for_others()
        leader = self._pod.node_rank
        verdict = choose_verdict(
            self._ends, self._lost, leader=leader, was_asked_to_stop=self.is_preempted, stalled=self._stalled
        )
        self._verdict = verdict
        self._broadcast("verdict", document=verdict.model_dump(mode="json"))
        if self._members:
            with suppress(TimeoutError):  # a node that has not received the verdict decides by itself
                await asyncio.wait_for(self._left.wait(), GOODBYE_SECONDS)
        return verdict

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for member in list(self._members.values()):
            member.connection.send("goodbye")
            await member.connection.close()

    async def _wait_for_others(self) -> None:
        """Wait until all nodes have ended.

        After a timeout, end programs that hang during their exit.
        """
        try:
            await asyncio.wait_for(self._settled.wait(), max(OTHERS_SECONDS, self._grace_seconds))
        except TimeoutError:
            self._end_all(LOST_END_SECONDS)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), ERROR_END_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            member = self._admit(connection, await accept_member(connection, self._pod.heartbeat_key))
            await self._follow(member)
        except (PeerLost, PeerRefused, TimeoutError, KeyError, ValueError) as error:
            connection.send("refused", message=str(error))
        finally:
            await connection.close()

    def _admit(self, connection: Connection, hello: Message) -> Member:
        """Admit a node.

        Raises:
            PeerRefused: its place is taken, the gang has started, or the pod belongs to an earlier gang.
        """
        rank, generation = int(hello["rank"]), int(hello["generation"])
        member = Member(rank, f"node {rank} (pod {hello['pod']} on node {hello['node']})", connection)
        if generation != self._pod.generation or not 0 < rank < self._num_nodes:
            raise PeerRefused(f"{member.name} of generation {generation} does not belong to this gang")
        if rank in self._members or self.started.is_set() or self._verdict is not None:
            raise PeerRefused(f"{member.name} has no place in a gang that has one already")
        self._members[rank] = member
        self._log(f"{member.name} is there: {len(self._members) + 1} of {self._num_nodes} nodes")
        connection.send("admitted")
        if self.stopping.is_set():
            connection.send("stop", preempted=self.is_preempted)
        if self.ending.is_set():
            connection.send("end", seconds=self.end_seconds)
        if self.attempt.done():
            send_attempt(connection, self.attempt.result())
        self._start_if_complete()
        return member

    async def _follow(self, member: Member) -> None:
        """Handle a member's messages until it leaves or is lost."""
        try:
            while True:
                message = await member.connection.receive()
                match message["type"]:
                    case "stop":
                        cause = "was asked to stop" if message["preempted"] else "has failed"
                        self._log(f"{member.name} {cause}: the whole gang saves and stops")
                        self.announce_stop(preempted=bool(message["preempted"]))
                    case "progress":
                        ranks = {int(rank): RankProgress.model_validate(each) for rank, each in message["ranks"].items()}
                        self._stall_watch.report(member.rank, ranks)
                    case "ended":
                        document = message["document"]
                        self._record_end(member.rank, ExitDocument.model_validate(document) if document else None)
                    case "goodbye":
                        break
        except PeerLost as lost:
            if self.started.is_set() and self._verdict is None:
                self._record_loss(member, f"{member.name} {lost}")
        self._remove(member)

    def _remove(self, member: Member) -> None:
        del self._members[member.rank]
        if not self._members:
            self._left.set()
        self._settle()

    def _start_if_complete(self) -> None:
        if self.attempt.done() and not self.missing_nodes() and not self.ending.is_set() and not self.stopping.is_set():
            self.started.set()
            self._broadcast("start")

    def _record_end(self, rank: int, end: ExitDocument | None) -> None:
        self._ends.setdefault(rank, end)
        if end is not None and end.reason is ExitReason.PREEMPTED:
            self.announce_stop(preempted=True)
        elif end is not None and end.reason not in ORDERLY_REASONS:
            self._end_all(LOST_END_SECONDS if end.reason in KILL_REASONS else ERROR_END_SECONDS)
        self._settle()

    def _record_loss(self, member: Member, message: str) -> None:
        if member.rank not in self._ends:
            self._log(f"{message}: the gang ends")
            self._lost[member.rank] = message
            self._end_all(LOST_END_SECONDS)

    def _record_stall(self, stalled: Mapping[int, Sequence[int]]) -> None:
        """End the gang, to restart from its checkpoint.

        Ranks that hang block the GPUs of all others.
        """
        names = {member.rank: member.name for member in self._members.values()}
        names[self._pod.node_rank] = f"node {self._pod.node_rank} (pod {self._pod.name} on node {self._pod.node})"
        places = [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} of {names.get(node, f'node {node}')}"
            for node, ranks in stalled.items()
        ]
        self._stalled = f"{' and '.join(places)} made no progress for {self._stall_limit} (schedule.stall_limit)"
        self._log(f"{self._stalled}: the gang ends")
        self._end_all(LOST_END_SECONDS)

    def _end_all(self, seconds: float) -> None:
        self.end_seconds = min(seconds, self.end_seconds)
        if not self.ending.is_set():
            self.ending.set()
            self._broadcast("end", seconds=self.end_seconds)

    def _settle(self) -> None:
        """Make the verdict due once every participating node has ended, left or is lost."""
        if self._pod.node_rank in self._ends and all(rank in self._ends for rank in self._members):
            self._settled.set()

    def _broadcast(self, kind: str, **fields: object) -> None:
        for member in self._members.values():
            member.connection.send(kind, **fields)


def send_attempt(connection: Connection, attempt: ClaimedAttempt) -> None:
    connection.send("attempt", number=attempt.number, previous_reason=attempt.previous_reason)
