"""Settings, database, store, compute and engine as one Dagster resource."""

from functools import cached_property

import dagster as dg

from recipes.storage.artifact_store import Store
from resources.compute.backends import open_backend
from resources.compute.base import Compute
from resources.datasets.validations import Validations
from resources.jobs.job_tokens import JobCredentials
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.jobs import Jobs
from resources.metadata.registry.version_lifecycle import Registry
from resources.monitoring.service_heartbeats import Heartbeats
from resources.serving.client import EngineClient
from resources.serving.replicated_engine import ReplicatedEngine, open_engine
from resources.settings.settings import Settings


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
    def engine(self) -> EngineClient | ReplicatedEngine:
        return open_engine(self.settings, self.database)

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
