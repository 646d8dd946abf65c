"""The exit reason of a failed step as Dagster metadata; sensors decide retries by it."""

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
"""Errors whose message is complete; others, such as KeyError, need their class name as well."""
DATABASE_ERRORS = {"OperationalError", "InterfaceError", "DagsterPostgresException"}
"""Matched by name: PEP 249 defines them, but SQLAlchemy and the drivers, not all installed, share no class."""

P = ParamSpec("P")
R = TypeVar("R")


def reports_exit_reason(compute: Callable[P, R]) -> Callable[P, R]:
    """Decorate an asset function: its errors become a `dagster.Failure` with an exit reason."""
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
    """Return a step's failure, with its message and its exit reason."""
    metadata = {EXIT_REASON: dg.MetadataValue.text(classify_exception(error).value)}
    return dg.Failure(describe_exception(error), metadata=metadata, allow_retries=allow_retries)


def classify_exception(error: Exception) -> ExitReason:
    """Classify an error of the process that supervises a program or records its results."""
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
    # By name as well: SQLAlchemy's TimeoutError, for a connection of its pool, is not derived from Python's.
    return ExitReason.SUPERVISOR_FAILED if names & {"TimeoutError", "MemoryError"} else ExitReason.PROGRAM_ERROR


def describe_exception(error: Exception) -> str:
    if isinstance(error, WRITTEN_FOR_USERS):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()
