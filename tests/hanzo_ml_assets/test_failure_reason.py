"""An asset's failure carries its exit reason through Dagster's event log."""

import sqlite3
from collections.abc import Iterator

import dagster as dg
import psycopg
import pytest
import sqlalchemy.exc
from dagster_postgres.utils import DagsterPostgresException

from hanzo_ml_assets.failure_reason import classify_exception, reports_exit_reason
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration
from recipes.storage.buckets import StoreFull, StoreRefuses, StoreUnavailable
from recipes.storage.locations import BrokenArtifact
from resources.compute.base import JobFailed
from resources.errors import invalid
from sensors.decisions.retry_policy import RunFailure, read_failure


def failed(compute: dg.AssetsDefinition) -> RunFailure:
    with dg.DagsterInstance.ephemeral() as instance:
        done = dg.materialize([compute], instance=instance, raise_on_error=False)
        return read_failure(instance, done.dagster_run)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (JobFailed("killed", ExitReason.OOM_KILLED), ExitReason.OOM_KILLED),
        (JobFailed("killed"), ExitReason.PROGRAM_ERROR),
        (BadConfiguration("no such recipe"), ExitReason.BAD_CONFIGURATION),
        (BrokenArtifact("other bytes"), ExitReason.BAD_CONFIGURATION),
        (StoreUnavailable("no answer"), ExitReason.STORAGE_UNAVAILABLE),
        (StoreRefuses("wrong key"), ExitReason.STORAGE_DENIED),
        (StoreFull("s3://x/y: no space is left"), ExitReason.STORAGE_FULL),
        (sqlalchemy.exc.OperationalError("SELECT 1", {}, Exception("closed")), ExitReason.DATABASE_UNAVAILABLE),
        (sqlalchemy.exc.InterfaceError("SELECT 1", {}, Exception("closed")), ExitReason.DATABASE_UNAVAILABLE),
        (sqlite3.OperationalError("database is locked"), ExitReason.DATABASE_UNAVAILABLE),
        (psycopg.errors.AdminShutdown("closed"), ExitReason.DATABASE_UNAVAILABLE),
        (DagsterPostgresException("too many retries"), ExitReason.DATABASE_UNAVAILABLE),
        (sqlalchemy.exc.IntegrityError("INSERT", {}, Exception("exists")), ExitReason.PROGRAM_ERROR),
        (sqlalchemy.exc.TimeoutError("no connection in the pool"), ExitReason.SUPERVISOR_FAILED),
        (TimeoutError("timed out"), ExitReason.SUPERVISOR_FAILED),
        (MemoryError("no 9 GB"), ExitReason.SUPERVISOR_FAILED),
        (KeyError("x"), ExitReason.PROGRAM_ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_each_error_of_a_supervisor_has_a_reason(error: Exception, reason: ExitReason) -> None:
    assert classify_exception(error) is reason


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (JobFailed("train failed:\n  no space", ExitReason.STORAGE_FULL), "train failed: no space"),
        (invalid("give a name"), "give a name"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_reason_and_message_are_read_back_from_the_log(error: Exception, cause: str) -> None:
    @dg.asset
    @reports_exit_reason
    def step() -> None:
        raise error

    found = failed(step)
    assert found.reasons == {classify_exception(error)}
    assert found.cause.startswith(f"{cause} (run ")


def test_yielding_asset_reports_its_failure_reason_after_its_results() -> None:
    @dg.multi_asset(specs=[dg.AssetSpec("first"), dg.AssetSpec("second")])
    @reports_exit_reason
    def steps(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        yield dg.MaterializeResult(asset_key="first")
        raise StoreUnavailable("no answer")

    with dg.DagsterInstance.ephemeral() as instance:
        done = dg.materialize([steps], instance=instance, raise_on_error=False)
        assert [event.asset_key for event in done.get_asset_materialization_events()] == [dg.AssetKey("first")]
        assert read_failure(instance, done.dagster_run).reasons == {ExitReason.STORAGE_UNAVAILABLE}


def test_dagster_failure_raised_by_an_asset_keeps_its_message_as_program_error() -> None:
    @dg.asset
    @reports_exit_reason
    def step() -> None:
        raise dg.Failure("promote a version first", allow_retries=False)

    found = failed(step)
    assert found.reasons == {ExitReason.PROGRAM_ERROR}
    assert found.cause.startswith("promote a version first (run ")


def test_a_failure_without_a_reason_is_classified_by_its_class() -> None:
    """From an older release, or raised by Dagster itself outside of the asset's computation."""

    @dg.asset
    def step() -> None:
        raise StoreUnavailable("no answer")

    found = failed(step)
    assert found.reasons == {ExitReason.STORAGE_UNAVAILABLE}
    assert found.cause.startswith("no answer (run ")
