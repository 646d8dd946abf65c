"""What the log of a failed run says: by which errors its steps ended, and what the first of them said."""

import re
from dataclasses import dataclass

import dagster as dg

OURS = re.compile(r"^(?:recipes|resources|hanzo_ml_assets)\.[\w.]+: ")
"""What Dagster puts before the words of an error of ours; those of others, such as KeyError, say little without it."""


@dataclass(frozen=True)
class Failure:
    """The names of the errors that the steps of a run ended with, and the cause in one line, with where the whole log is."""

    errors: frozenset[str]
    cause: str


def read_failure(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Failure:
    """Reads the run's log: not for every look."""
    logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    events = [entry.dagster_event for entry in logs if entry.dagster_event is not None]
    errors = (event.step_failure_data.error for event in events)
    said = next(filter(None, map(message_of, events)), "its worker died")
    return Failure(
        errors=frozenset(str((error.cause or error).cls_name) for error in errors if error is not None),
        cause=f"{said} (run {run.run_id} in Dagster)",
    )


def message_of(event: dg.DagsterEvent) -> str:
    """What the user's code said: a `Failure` or an error of ours in its own words, any other by the error that it was
    wrapped in.
    """
    data = event.step_failure_data
    if data.user_failure_data is not None and data.user_failure_data.description:
        return " ".join(data.user_failure_data.description.split())
    error = data.error.cause or data.error if data.error is not None else None
    return " ".join(OURS.sub("", error.message, count=1).split()) if error is not None else ""
