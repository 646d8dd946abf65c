"""Decide why an attempt ended: per node from its program's end, then for the gang.

Pure functions. A failure on one node makes the programs of the others fail as well, in other words and often at the same
moment, so that a cause and its consequences are distinguished by kind first, then by time.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.contracts.exit_reason import ExitDocument, ExitReason, classify_message

SIGNAL_EXIT_OFFSET = 128
"""Added by torchrun and shells to the number of the signal that ended a process."""
RANK_KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Not SIGTERM, by which torchrun ends ranks, nor SIGABRT, by which NCCL ends a rank that has lost a peer."""
NO_RESULT = "the program exited with 0, but left no result"

MEMORY_KILL_EXPLAINS = (ExitReason.PROGRAM_ERROR, ExitReason.KILLED, ExitReason.UNKNOWN)
"""Reasons that an OOM kill overrides, because the program could not know about it."""
STOP_EXPLAINS = (ExitReason.PROGRAM_ERROR, ExitReason.KILLED, ExitReason.UNKNOWN, ExitReason.NODE_LOST)
"""Ends of programs after a stop request that did not save in time, or whose peers have stopped."""
PRECEDENCE = (
    ExitReason.BAD_CONFIGURATION,
    ExitReason.OOM_KILLED,
    ExitReason.OUT_OF_MEMORY,
    ExitReason.NODE_LOST,
    ExitReason.STALLED,
    ExitReason.KILLED,
    ExitReason.RESTART_REQUESTED,
    ExitReason.STORAGE_FULL,
    ExitReason.STORAGE_READ_ONLY,
    ExitReason.STORAGE_DENIED,
    ExitReason.STORAGE_UNAVAILABLE,
)
"""Causes precede their consequences: a killed rank makes others end with PROGRAM_ERROR. Unlisted reasons come last."""


@dataclass(frozen=True)
class ProgramEnd:
    """How the program of one node ended.

    Args:
        code: its exit code, negative if a signal ended it.
        document: the exit document that it wrote.
        memory_kill: why the kernel killed one of its processes, if it did.
        was_asked_to_stop: the gang received a stop request.
        was_ended: the launcher ended it because the gang could not continue.
        was_killed: the launcher sent SIGKILL to end it.
        lacks_result: it exited with 0 without leaving its result.
    """

    code: int
    document: ExitDocument | None = None
    memory_kill: str | None = None
    was_asked_to_stop: bool = False
    was_ended: bool = False
    was_killed: bool = False
    lacks_result: bool = False


def classify_end(end: ProgramEnd) -> ExitDocument | None:
    """Return why a node's program ended; None if only because the launcher ended it."""
    if end.code == 0 and not end.lacks_result:
        return ExitDocument(code=0, message="", reason=ExitReason.COMPLETED)
    found = end.document or _classify_code(end)
    if end.memory_kill and found.reason in MEMORY_KILL_EXPLAINS:
        return ExitDocument(code=None, message=f"out of memory: {end.memory_kill}", reason=ExitReason.OOM_KILLED)
    if end.was_ended and end.document is None and not _lost_a_rank(end):
        return None
    if end.was_asked_to_stop and found.reason in STOP_EXPLAINS:
        return preempted(f"asked to stop, and ended before it had saved: {found.message}")
    return found


def _lost_a_rank(end: ProgramEnd) -> bool:
    """Return whether torchrun reports a killed rank that the launcher did not kill.

    Its peers may report their lost connections first. Then the launcher ends this program, before it can report the cause.
    """
    return not end.was_killed and end.code - SIGNAL_EXIT_OFFSET in RANK_KILLS


def _classify_code(end: ProgramEnd) -> ExitDocument:
    if end.code == 0:
        return ExitDocument(code=0, message=NO_RESULT, reason=ExitReason.UNKNOWN)
    number = -end.code if end.code < 0 else end.code - SIGNAL_EXIT_OFFSET
    if number in set(signal.Signals):
        name = signal.Signals(number).name
        return ExitDocument(code=None, message=f"the program was killed ({name})", reason=ExitReason.KILLED)
    message = f"the program exited with {end.code} without saying why: see the end of its log"
    return ExitDocument(code=end.code, message=message, reason=classify_message(end.code, ""))


def preempted(message: str) -> ExitDocument:
    return ExitDocument(code=ExitReason.PREEMPTED.exit_code, message=message, reason=ExitReason.PREEMPTED)


def choose_verdict(
    ends: Mapping[int, ExitDocument | None],
    lost: Mapping[int, str],
    *,
    leader: int,
    was_asked_to_stop: bool,
    stalled: str = "",
) -> ExitDocument:
    """Return why a gang ended.

    Args:
        ends: ends by node rank in order of arrival; None for a program that was ended with the gang.
        lost: descriptions of lost nodes, by node rank.
        stalled: the ranks that made no progress, if the gang was ended for that.
        leader: the rank that verifies that the result exists before reporting COMPLETED.
    """
    first = ends.get(leader)
    if first is not None and first.reason is ExitReason.COMPLETED:
        return first
    causes = [
        end if rank == leader else end.model_copy(update={"message": f"node {rank}: {end.message}"})
        for rank, end in ends.items()
        if end is not None and end.reason is not ExitReason.COMPLETED
    ]
    if lost:
        message = "; ".join(lost.values())
        causes.append(ExitDocument(code=None, message=message, reason=ExitReason.NODE_LOST))
    if stalled:
        causes.append(ExitDocument(code=None, message=stalled, reason=ExitReason.STALLED))
    if not causes:
        message = "its programs were ended, and none of them said why"
        causes.append(ExitDocument(code=None, message=message, reason=ExitReason.UNKNOWN))
    verdict = min(causes, key=lambda cause: _precedence(cause.reason, was_asked_to_stop=was_asked_to_stop))
    if first is not None and first.reason is verdict.reason is ExitReason.PREEMPTED:
        return first  # only the leader knows what was saved; torchrun on other nodes only reports the stop request
    if was_asked_to_stop and verdict.reason in STOP_EXPLAINS:
        return preempted(f"asked to stop, and ended before it had saved: {verdict.message}")
    return verdict


def _precedence(reason: ExitReason, *, was_asked_to_stop: bool) -> int:
    """Return the rank of a reason among causes, lowest first.

    Nodes that save and stop because another node failed end as PREEMPTED, which is no cause then.
    """
    if reason in PRECEDENCE:
        return PRECEDENCE.index(reason)
    if reason is ExitReason.PREEMPTED:
        return len(PRECEDENCE) + (0 if was_asked_to_stop else 3)
    # A program that only lost its connection to a peer does not know the cause.
    return len(PRECEDENCE) + (2 if reason is ExitReason.UNKNOWN else 1)
