"""Decision table of exit reasons: restart, retry of the Dagster run, exit code."""

from typing import NamedTuple

import pytest

from recipes.contracts.exit_reason import ExitReason


class Decision(NamedTuple):
    """Decision for one reason.

    `downstream` and `job`: whether a failed Dagster run of an evaluation, or of the job itself, is retried.
    """

    restarts: bool
    counts: bool
    downstream: bool
    job: bool
    trial_waits: bool
    exit_code: int


DECISIONS = {
    ExitReason.COMPLETED: Decision(False, False, False, False, False, 0),
    ExitReason.BAD_CONFIGURATION: Decision(False, True, False, False, False, 78),
    ExitReason.PROGRAM_ERROR: Decision(False, True, False, False, False, 1),
    ExitReason.OUT_OF_MEMORY: Decision(False, True, True, False, False, 1),
    ExitReason.OOM_KILLED: Decision(True, True, True, False, False, 75),
    ExitReason.KILLED: Decision(True, True, True, False, False, 75),
    ExitReason.PREEMPTED: Decision(True, False, True, False, False, 143),
    ExitReason.RESTART_REQUESTED: Decision(True, True, True, False, False, 75),
    ExitReason.NODE_LOST: Decision(True, False, True, False, False, 75),
    ExitReason.STALLED: Decision(True, True, True, False, False, 75),
    ExitReason.STORAGE_UNAVAILABLE: Decision(True, True, True, True, True, 75),
    ExitReason.STORAGE_DENIED: Decision(True, True, True, True, False, 75),
    ExitReason.STORAGE_FULL: Decision(False, True, True, True, True, 1),
    ExitReason.STORAGE_READ_ONLY: Decision(False, True, False, False, False, 1),
    ExitReason.TIMED_OUT: Decision(False, True, False, False, False, 1),
    ExitReason.CANCELLED: Decision(False, True, False, False, False, 1),
    ExitReason.DATABASE_UNAVAILABLE: Decision(False, True, True, True, False, 1),
    ExitReason.SUPERVISOR_FAILED: Decision(False, True, True, True, False, 1),
    ExitReason.UNKNOWN: Decision(True, True, False, False, False, 75),
}


@pytest.mark.parametrize("reason", ExitReason)
def test_each_exit_reason_maps_to_its_decisions(reason: ExitReason) -> None:
    assert DECISIONS[reason] == Decision(
        restarts=reason.restarts,
        counts=reason.counts,
        downstream=reason.is_infrastructure,
        job=reason.is_outside_program,
        trial_waits=reason.is_store_outage,
        exit_code=reason.exit_code,
    )


def test_stored_values_never_change() -> None:
    """They are stored in `exit.json` and in Dagster's log."""
    stored = """
        completed bad_configuration program_error out_of_memory oom_killed killed preempted restart_requested node_lost
        stalled storage_unavailable storage_denied storage_full storage_read_only timed_out cancelled database_unavailable
        supervisor_failed unknown
    """
    assert [str(reason) for reason in ExitReason] == stored.split()
