"""Exit reasons of what carries none: the only place that reads our own text and class names.

That is `exit.json` and Dagster logs of releases before `ExitReason`, and failures that Dagster raises itself outside an
asset's code. The patterns match what those releases wrote: they never change with today's messages.
"""

import re

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import EXIT_BAD_CONFIGURATION, EXIT_PREEMPTED, EXIT_RESTART

STORE_DENIED = re.compile(r"^starting again: the object store refuses:", re.IGNORECASE)
STORE_UNAVAILABLE = re.compile(r"^starting again: the object store", re.IGNORECASE)
NO_SPACE = re.compile(r"^no space left", re.IGNORECASE)
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|OOMKilled|MemoryError", re.IGNORECASE)

CLASSES = {
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


def reason_of_message(code: int | None, message: str) -> ExitReason:
    """The reason in an exit document that holds an exit code and a message alone."""
    if code == EXIT_BAD_CONFIGURATION:
        return ExitReason.BAD_CONFIGURATION
    if code == EXIT_PREEMPTED:
        return ExitReason.PREEMPTED
    if code == EXIT_RESTART:
        if STORE_DENIED.search(message):
            return ExitReason.STORAGE_DENIED
        return ExitReason.STORAGE_UNAVAILABLE if STORE_UNAVAILABLE.search(message) else ExitReason.RESTART_REQUESTED
    if code is None:
        return ExitReason.UNKNOWN
    if code > 128:
        return ExitReason.KILLED
    if NO_SPACE.search(message):
        return ExitReason.STORAGE_FULL
    return ExitReason.OUT_OF_MEMORY if OUT_OF_MEMORY.search(message) else ExitReason.PROGRAM_ERROR


def reason_of_class(name: str) -> ExitReason:
    """The reason of a failure in Dagster's log that holds the name of an exception's class alone."""
    return CLASSES.get(name, ExitReason.PROGRAM_ERROR)
