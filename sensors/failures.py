"""Why the steps of a failed Dagster run ended, and the first message, read from the run's event log."""

import re
from dataclasses import dataclass

import dagster as dg

from hanzo_ml_assets.failure_reason import EXIT_REASON
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.legacy_exit_reason import reason_of_class

OUR_CLASS = re.compile(r"^(?:recipes|resources|hanzo_ml_assets)\.[\w.]+: ")
"""Prefix of our own errors' messages in logs of releases that recorded no exit reason."""


@dataclass(frozen=True)
class Failure:
    """The exit reasons of a run's failed steps, and the cause in one line, with the run that has the whole log."""

    reasons: frozenset[ExitReason]
    cause: str


def read_failure(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Failure:
    """Reads the run's log, which is too expensive for every sensor tick."""
    logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    events = [entry.dagster_event for entry in logs if entry.dagster_event is not None]
    message = next(filter(None, map(message_of, events)), "its worker died")
    return Failure(
        reasons=frozenset(reason for reason in map(reason_of, events) if reason is not None),
        cause=f"{message} (run {run.run_id} in Dagster)",
    )


def reason_of(event: dg.DagsterEvent) -> ExitReason | None:
    """The recorded exit reason; without one, that of the error's class. None where the log has no error."""
    data = event.step_failure_data
    recorded = data.user_failure_data.metadata.get(EXIT_REASON) if data.user_failure_data is not None else None
    if recorded is not None and recorded.value in set(ExitReason):
        return ExitReason(recorded.value)
    return reason_of_class(str((data.error.cause or data.error).cls_name)) if data.error is not None else None


def message_of(event: dg.DagsterEvent) -> str:
    """The failure's description; without one, the message of the error, or of the one that it wraps."""
    data = event.step_failure_data
    if data.user_failure_data is not None and data.user_failure_data.description:
        return " ".join(data.user_failure_data.description.split())
    error = data.error.cause or data.error if data.error is not None else None
    return " ".join(OUR_CLASS.sub("", error.message, count=1).split()) if error is not None else ""
