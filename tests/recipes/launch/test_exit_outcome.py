"""Outcome of an attempt: root causes win over consequences; unfinished work is never complete."""

import pytest

from recipes.contracts.exit_reason import ExitDocument, ExitReason
from recipes.launch.exit_outcome import ProgramEnd, choose_verdict, classify_end
from recipes.platform_errors import classify_output

R = ExitReason


def document(reason: ExitReason, message: str = "m") -> ExitDocument:
    return ExitDocument(code=reason.exit_code, message=message, reason=reason)


ERROR = document(R.PROGRAM_ERROR, "connection closed by peer")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (ProgramEnd(0), R.COMPLETED),
        (ProgramEnd(0, was_asked_to_stop=True), R.COMPLETED),
        (ProgramEnd(0, lacks_result=True), R.UNKNOWN),
        (ProgramEnd(0, lacks_result=True, was_asked_to_stop=True), R.PREEMPTED),
        (ProgramEnd(1, ERROR), R.PROGRAM_ERROR),
        (ProgramEnd(1), R.PROGRAM_ERROR),
        (ProgramEnd(78), R.BAD_CONFIGURATION),
        (ProgramEnd(75, document(R.STORAGE_UNAVAILABLE)), R.STORAGE_UNAVAILABLE),
        (ProgramEnd(-9), R.KILLED),
        (ProgramEnd(137), R.KILLED),
        (ProgramEnd(-9, memory_kill="at the limit"), R.OOM_KILLED),
        (ProgramEnd(1, ERROR, memory_kill="at the limit"), R.OOM_KILLED),
        (ProgramEnd(78, document(R.BAD_CONFIGURATION), memory_kill="at the limit"), R.BAD_CONFIGURATION),
        (ProgramEnd(143, document(R.PREEMPTED), memory_kill="at the limit"), R.PREEMPTED),
        (ProgramEnd(143), R.KILLED),
        (ProgramEnd(143, was_asked_to_stop=True), R.PREEMPTED),
        (ProgramEnd(1, ERROR, was_asked_to_stop=True), R.PREEMPTED),
        (ProgramEnd(1, document(R.STORAGE_FULL), was_asked_to_stop=True), R.STORAGE_FULL),
        (ProgramEnd(1, ERROR, was_ended=True), R.PROGRAM_ERROR),
        (ProgramEnd(137, was_ended=True), R.KILLED),
    ],
)
def test_end_of_a_program_is_classified(end: ProgramEnd, reason: ExitReason) -> None:
    found = classify_end(end)
    assert found is not None and found.reason is reason
    assert (found.reason.exit_code == 0) == (reason is R.COMPLETED)


@pytest.mark.parametrize("code", [-9, -15, 143])
def test_program_ended_with_the_others_has_no_reason_of_its_own(code: int) -> None:
    assert classify_end(ProgramEnd(code, was_ended=True)) is None


def test_program_killed_by_the_launcher_has_no_reason_of_its_own() -> None:
    assert classify_end(ProgramEnd(137, was_ended=True, was_killed=True)) is None


@pytest.mark.parametrize(
    ("ends", "lost", "reason", "message"),
    [
        ({0: document(R.COMPLETED), 1: ERROR}, {}, R.COMPLETED, "m"),
        ({1: document(R.COMPLETED), 0: ERROR}, {}, R.PROGRAM_ERROR, "connection closed by peer"),
        ({0: ERROR, 1: document(R.KILLED)}, {}, R.KILLED, "node 1: m"),
        ({0: ERROR}, {1: "node 1 sent no heartbeat"}, R.NODE_LOST, "node 1 sent no heartbeat"),
        ({0: ERROR, 2: document(R.OOM_KILLED)}, {1: "node 1 is gone"}, R.OOM_KILLED, "node 2: m"),
        ({0: document(R.KILLED), 1: document(R.BAD_CONFIGURATION)}, {}, R.BAD_CONFIGURATION, "node 1: m"),
        ({0: None, 1: document(R.RESTART_REQUESTED, "half the batch")}, {}, R.RESTART_REQUESTED, "node 1: half the batch"),
        ({1: document(R.PREEMPTED), 0: document(R.PROGRAM_ERROR, "no such column")}, {}, R.PROGRAM_ERROR, "no such column"),
        ({1: ERROR, 0: document(R.PROGRAM_ERROR, "later")}, {}, R.PROGRAM_ERROR, "node 1: connection closed by peer"),
        ({0: None, 1: None}, {}, R.UNKNOWN, "its programs were ended, and none of them said why"),
    ],
)
def test_verdict_names_the_cause(
    ends: dict[int, ExitDocument | None], lost: dict[int, str], reason: ExitReason, message: str
) -> None:
    verdict = choose_verdict(ends, lost, leader=0, was_asked_to_stop=False)
    assert (verdict.reason, verdict.message) == (reason, message)


@pytest.mark.parametrize(
    ("ends", "lost", "reason"),
    [
        ({0: document(R.PREEMPTED), 1: document(R.PREEMPTED)}, {}, R.PREEMPTED),
        ({0: document(R.PREEMPTED), 1: ERROR}, {}, R.PREEMPTED),
        ({0: document(R.PREEMPTED)}, {1: "node 1 is gone"}, R.PREEMPTED),
        ({0: document(R.PREEMPTED), 1: document(R.BAD_CONFIGURATION)}, {}, R.BAD_CONFIGURATION),
        ({0: document(R.PREEMPTED), 1: document(R.STORAGE_FULL)}, {}, R.STORAGE_FULL),
        ({0: document(R.COMPLETED), 1: document(R.PREEMPTED)}, {}, R.COMPLETED),
    ],
)
def test_gang_that_was_asked_to_stop_is_preempted_unless_it_failed_by_itself(
    ends: dict[int, ExitDocument | None], lost: dict[int, str], reason: ExitReason
) -> None:
    assert choose_verdict(ends, lost, leader=0, was_asked_to_stop=True).reason is reason


def test_verdict_of_a_preempted_gang_is_that_of_the_first_node() -> None:
    killed = document(R.PREEMPTED, "asked to stop, and ended before it had saved: the program was killed (SIGTERM)")
    saved = document(R.PREEMPTED, "preempted: checkpoint 11 holds everything")
    assert choose_verdict({1: killed, 0: saved}, {}, leader=0, was_asked_to_stop=True) == saved


PEER_ERRORS = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:554] Connection closed by peer [10.244.1.7]:38211",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2021, remote process exited or there was a network error",
    "DistNetworkError: failed to recv, got 0 bytes",
)


@pytest.mark.parametrize("message", PEER_ERRORS)
def test_program_that_lost_its_peer_is_restarted(message: str) -> None:
    """Regression: node 0's rank was killed, its launcher reported too late, the job ended permanently."""
    end = ExitDocument(code=1, message=message, reason=classify_output(message))
    verdict = choose_verdict({1: end, 0: None}, {}, leader=0, was_asked_to_stop=False)
    assert verdict.reason.restarts and verdict.reason.counts


def test_program_error_takes_precedence_over_lost_peer_errors() -> None:
    lost = ExitDocument(code=1, message=PEER_ERRORS[0], reason=classify_output(PEER_ERRORS[0]))
    own = ExitDocument(code=1, message="ValueError: bad label", reason=ExitReason.PROGRAM_ERROR)
    verdict = choose_verdict({0: lost, 1: own}, {}, leader=0, was_asked_to_stop=False)
    assert (verdict.reason, verdict.message) == (ExitReason.PROGRAM_ERROR, "node 1: ValueError: bad label")
