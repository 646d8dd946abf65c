"""Exit reasons of attempts, their stored document `exit.json`, and classification of older records."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, EXIT_FILE, EXIT_PREEMPTED, EXIT_RESTART

# Why an attempt ended: one enum, and the decisions that follow from each reason.
#
# The program writes the reason when it ends, the supervisor if the program was killed. Restarts, retries of Dagster runs,
# recovery and user messages depend on it alone; the accompanying message is for users.


class ExitReason(StrEnum):
    """Why an attempt of a job, or its supervisor, ended. The values are stored."""

    COMPLETED = "completed"
    BAD_CONFIGURATION = "bad_configuration"  # the user's input is wrong; the message says what to do
    PROGRAM_ERROR = "program_error"  # an error of the program, or of the user's script
    OUT_OF_MEMORY = "out_of_memory"  # an allocation failed, and the program has no smaller way to compute
    OOM_KILLED = "oom_killed"  # the kernel killed it for lack of memory
    KILLED = "killed"  # by a signal that it could not handle
    PREEMPTED = "preempted"  # received a stop request and saved its state
    RESTART_REQUESTED = "restart_requested"  # by the program, which has recorded how to proceed differently
    NODE_LOST = "node_lost"  # the machine became unavailable
    STALLED = "stalled"  # it made no progress for schedule.stall_limit
    STORAGE_UNAVAILABLE = "storage_unavailable"  # the object store does not answer
    STORAGE_DENIED = "storage_denied"  # it refuses the keys, or has no such bucket
    STORAGE_FULL = "storage_full"  # no space left in the store or on the local disk
    STORAGE_READ_ONLY = "storage_read_only"  # the local disk was remounted read-only after errors
    TIMED_OUT = "timed_out"  # it used up schedule.max_duration
    CANCELLED = "cancelled"
    DATABASE_UNAVAILABLE = "database_unavailable"  # the supervisor could not reach the metadata or Dagster's database
    SUPERVISOR_FAILED = "supervisor_failed"  # the supervisor ran out of memory or time; the program may still be running
    UNKNOWN = "unknown"  # it ended by itself without recording why

    @property
    def restarts(self) -> bool:
        """Whether the supervisor starts the next attempt."""
        return self in RESTARTED

    @property
    def counts(self) -> bool:
        """Whether the attempt counts against the job's limit of restarts."""
        return self not in UNCOUNTED

    @property
    def is_infrastructure(self) -> bool:
        """Whether neither the user nor the program is at fault.

        A retry, maybe elsewhere, may succeed.
        """
        return self in INFRASTRUCTURE

    @property
    def is_outside_program(self) -> bool:
        """Whether storage, a database or the supervisor failed; the program's own work can continue."""
        return self in OUTSIDE_PROGRAM

    @property
    def is_store_outage(self) -> bool:
        """Whether it ends as soon as the store answers, or has space again.

        Wrong credentials need an operator instead.
        """
        return self in STORE_OUTAGES

    @property
    def exit_code(self) -> int:
        """The program's exit code: all that a container runtime sees of the reason."""
        return EXIT_CODES.get(self, EXIT_RESTART if self.restarts else EXIT_ERROR)


EXIT_ERROR = 1
EXIT_CODES = {
    ExitReason.COMPLETED: 0,
    ExitReason.BAD_CONFIGURATION: EXIT_BAD_CONFIGURATION,
    ExitReason.PREEMPTED: EXIT_PREEMPTED,
}
"""Exit codes of reasons that have their own."""

RESTARTED = frozenset(
    {
        ExitReason.OOM_KILLED,
        ExitReason.KILLED,
        ExitReason.PREEMPTED,
        ExitReason.RESTART_REQUESTED,
        ExitReason.NODE_LOST,
        ExitReason.STALLED,
        ExitReason.STORAGE_UNAVAILABLE,
        ExitReason.STORAGE_DENIED,
        ExitReason.UNKNOWN,
    }
)
UNCOUNTED = frozenset({ExitReason.COMPLETED, ExitReason.PREEMPTED, ExitReason.NODE_LOST})
STORE_OUTAGES = frozenset({ExitReason.STORAGE_UNAVAILABLE, ExitReason.STORAGE_FULL})
OUTSIDE_PROGRAM = STORE_OUTAGES | {
    ExitReason.STORAGE_DENIED,
    ExitReason.DATABASE_UNAVAILABLE,
    ExitReason.SUPERVISOR_FAILED,
}
INFRASTRUCTURE = OUTSIDE_PROGRAM | {
    ExitReason.OUT_OF_MEMORY,
    ExitReason.OOM_KILLED,
    ExitReason.KILLED,
    ExitReason.PREEMPTED,
    ExitReason.RESTART_REQUESTED,
    ExitReason.NODE_LOST,
    ExitReason.STALLED,
}


# Classify records without a reason. This is the only place that parses our own messages and class names.
#
# Such records are `exit.json` and Dagster logs of releases before `ExitReason`, and failures that Dagster itself raises
# outside an asset's code. The patterns match what those releases wrote: they do not change with today's messages.

STORE_DENIED_MESSAGE = re.compile(r"^starting again: the object store refuses:", re.IGNORECASE)
STORE_UNAVAILABLE_MESSAGE = re.compile(r"^starting again: the object store", re.IGNORECASE)
NO_SPACE_MESSAGE = re.compile(r"^no space left", re.IGNORECASE)
OUT_OF_MEMORY_MESSAGE = re.compile(r"out of memory|OutOfMemory|OOMKilled|MemoryError", re.IGNORECASE)

REASONS_BY_EXCEPTION_NAME = {
    "BadConfiguration": ExitReason.BAD_CONFIGURATION,
    "StoreUnavailable": ExitReason.STORAGE_UNAVAILABLE,
    "NoStore": ExitReason.STORAGE_UNAVAILABLE,
    "StoreFull": ExitReason.STORAGE_FULL,
    "StoreRefuses": ExitReason.STORAGE_DENIED,
    "RefusedByStore": ExitReason.STORAGE_DENIED,
    "OperationalError": ExitReason.DATABASE_UNAVAILABLE,
    "InterfaceError": ExitReason.DATABASE_UNAVAILABLE,
    "DagsterPostgresException": ExitReason.DATABASE_UNAVAILABLE,
    "TimeoutError": ExitReason.SUPERVISOR_FAILED,
    "MemoryError": ExitReason.SUPERVISOR_FAILED,
    "MachineFailed": ExitReason.KILLED,
}


def classify_message(code: int | None, message: str) -> ExitReason:
    """Return the reason for an exit document with only an exit code and a message."""
    if code == EXIT_BAD_CONFIGURATION:
        return ExitReason.BAD_CONFIGURATION
    if code == EXIT_PREEMPTED:
        return ExitReason.PREEMPTED
    if code == EXIT_RESTART:
        if STORE_DENIED_MESSAGE.search(message):
            return ExitReason.STORAGE_DENIED
        return ExitReason.STORAGE_UNAVAILABLE if STORE_UNAVAILABLE_MESSAGE.search(message) else ExitReason.RESTART_REQUESTED
    if code is None:
        return ExitReason.UNKNOWN
    if code > 128:
        return ExitReason.KILLED
    if NO_SPACE_MESSAGE.search(message):
        return ExitReason.STORAGE_FULL
    return ExitReason.OUT_OF_MEMORY if OUT_OF_MEMORY_MESSAGE.search(message) else ExitReason.PROGRAM_ERROR


def classify_exception_name(name: str) -> ExitReason:
    """Return the reason for a failure in Dagster's log, by its exception's class name."""
    return REASONS_BY_EXCEPTION_NAME.get(name, ExitReason.PROGRAM_ERROR)


# `exit.json`: how the latest attempt of a job ended, for the supervisor and for users.


class ExitDocument(BaseModel):
    """How an attempt ended.

    `code` is None if the program was killed or could not write it. Documents of older releases have no reason, and those of
    newer releases may have an unknown one: both are classified by code and message.
    """

    model_config = ConfigDict(frozen=True)

    code: int | None
    message: str
    reason: ExitReason

    @model_validator(mode="before")
    @classmethod
    def classify_without_reason(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("reason") not in set(ExitReason):
            code, message = value.get("code"), str(value.get("message", ""))
            known = code if isinstance(code, int) else None
            return {**value, "reason": classify_message(known, message)}
        return value


NO_ROOM = "it ended by itself, and found no room to say why: free some space; the end of its log may say more"


def read_exit_document(work: Path) -> ExitDocument | None:
    """Read the exit document that the program wrote, or None if it was killed before."""
    try:
        return ExitDocument.model_validate_json((work / EXIT_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return ExitDocument(code=None, message=NO_ROOM, reason=ExitReason.UNKNOWN)
