"""Settings, database, store, compute and engine as one Dagster resource."""

import logging
from functools import cached_property

import dagster as dg

from recipes.contracts.job import Job
from recipes.storage.artifact_store import Store
from resources.compute.backends import open_backend
from resources.compute.base import Compute, Follower, Observation, Phase
from resources.datasets.validations import Validations
from resources.jobs.job_tokens import JobCredentials
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.jobs import Jobs
from resources.metadata.registry.version_lifecycle import Registry
from resources.monitoring.service_heartbeats import Heartbeats
from resources.serving.client import EngineClient
from resources.settings.settings import Settings

log = logging.getLogger(__name__)


class ControlPlane(dg.ConfigurableResource):  # type: ignore[misc]
    """Settings, metadata, object store, compute and engine.

    Holds nothing itself: each process opens its own, and tests run against the real ones in a temporary state folder.
    """

    @cached_property
    def settings(self) -> Settings:
        return Settings.load()

    @cached_property
    def database(self) -> Database:
        return Database(self.settings.database_url, self.settings.database.connect_seconds)

    @cached_property
    def store(self) -> Store:
        return Store(self.settings.store, self.settings.storage.variables)

    @cached_property
    def compute(self) -> Compute:
        return open_backend(self.settings, JobCredentials(self.database))

    @cached_property
    def engine(self) -> EngineClient:
        return EngineClient(self.settings.engine_url)

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.database)

    @property
    def heartbeats(self) -> Heartbeats:
        return Heartbeats(self.database)

    @property
    def datasets(self) -> Datasets:
        return Datasets(self.database)

    @property
    def validations(self) -> Validations:
        return Validations(self.database)

    @property
    def registry(self) -> Registry:
        return Registry(self.database)

    @property
    def cache_dir(self) -> str:
        return str(self.settings.home / "cache")


def follow_job(context: dg.AssetExecutionContext, job: Job, jobs: Jobs | None = None) -> Follower:
    """Report the log and the phases of a job in the log of its Dagster run.

    The record of a job that is among `jobs` also says what its program waits for: without it, a job that has no GPU yet
    looks as if it ran without result.
    """

    def phase(seen: Observation) -> None:
        context.log.info(f"{job.program} is {seen.phase} (attempt {seen.attempt}) {seen.detail}".rstrip())
        if jobs is not None:
            waits = seen.phase in (Phase.PENDING, Phase.STARTING, Phase.SUSPENDED)
            jobs.set_waiting_reason(job.id, seen.detail if waits else "", "running")

    return Follower(
        line=lambda line: context.log.info(line),
        phase=phase,
        is_cancelled=lambda: is_run_cancelled(context.instance, context.run_id),
    )


def is_run_cancelled(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether an interrupted run worker is to end its job: an evicted one is interrupted in the same way.

    False where Dagster's database does not answer: the sensor `stop_cancelled_jobs` ends jobs that nobody supervises.
    """
    try:
        run = instance.get_run_by_id(run_id)
    except Exception as error:
        log.warning("cannot read the status of run %s, its job goes on: %r", run_id, error)
        return False
    return run is not None and run.status in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
