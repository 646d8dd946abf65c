"""The exit reason of a failed step, as metadata of its failure in Dagster: sensors decide about retries by that."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import isgeneratorfunction
from typing import Any, ParamSpec, TypeVar, cast

import dagster as dg

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration
from recipes.storage.artifact_store import BrokenArtifact
from recipes.storage.buckets import StoreFull, StoreRefuses, StoreUnavailable
from resources.compute.base import JobFailed
from resources.errors import HanzoError

EXIT_REASON = "hanzo_ml/exit_reason"
"""Metadata key of a step's failure."""
WRITTEN_FOR_USERS = (HanzoError, BadConfiguration, JobFailed, StoreUnavailable, StoreFull, BrokenArtifact)
"""Their messages say all by themselves; that of another error, such as KeyError, says little without its class."""
DATABASE_ERRORS = {"OperationalError", "InterfaceError", "DagsterPostgresException"}
"""By name: PEP 249 names them, and SQLAlchemy and the drivers, of which not all are installed, share no class."""

P = ParamSpec("P")
R = TypeVar("R")


def reports_exit_reason(compute: Callable[P, R]) -> Callable[P, R]:
    """Decorate what an asset computes: an error that it raises becomes a `dagster.Failure` with its exit reason."""
    if isgeneratorfunction(compute):

        @wraps(compute)
        def generate(*args: P.args, **kwargs: P.kwargs) -> Iterator[Any]:
            with failure_with_reason():
                yield from cast(Iterator[Any], compute(*args, **kwargs))

        return cast(Callable[P, R], generate)

    @wraps(compute)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with failure_with_reason():
            return compute(*args, **kwargs)

    return call


@contextmanager
def failure_with_reason() -> Iterator[None]:
    try:
        yield
    except dg.Failure:
        raise
    except Exception as error:
        raise make_failure(error) from error


def make_failure(error: Exception, *, allow_retries: bool = True) -> dg.Failure:
    """The failure of a step: its words for people, and its exit reason."""
    metadata = {EXIT_REASON: dg.MetadataValue.text(classify_exception(error).value)}
    return dg.Failure(describe_exception(error), metadata=metadata, allow_retries=allow_retries)


def classify_exception(error: Exception) -> ExitReason:
    """Of an error in the process that supervises a program, or records what it made."""
    match error:
        case JobFailed():
            return error.reason
        case BadConfiguration() | BrokenArtifact():
            return ExitReason.BAD_CONFIGURATION
        case StoreRefuses():
            return ExitReason.STORAGE_DENIED
        case StoreUnavailable():
            return ExitReason.STORAGE_UNAVAILABLE
        case StoreFull():
            return ExitReason.STORAGE_FULL
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & DATABASE_ERRORS:
        return ExitReason.DATABASE_UNAVAILABLE
    # By name as well: SQLAlchemy's TimeoutError, for a connection of its pool, is none of Python's.
    return ExitReason.SUPERVISOR_FAILED if names & {"TimeoutError", "MemoryError"} else ExitReason.PROGRAM_ERROR


def describe_exception(error: Exception) -> str:
    if isinstance(error, WRITTEN_FOR_USERS):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()
