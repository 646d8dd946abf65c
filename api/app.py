"""The application: which routes there are, and the objects that they share.

Adding routes is one line in `MLFLOW_ROUTERS` or `ROUTERS`. What does not belong here: how it is served (`server`).
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from api import errors, health
from api.host_guard import LOOPBACK_NAMES, HostGuard
from api.mlflow import artifacts, experiments, logged_models, metrics, runs, server_info
from api.run_artifacts import RunArtifacts
from api.v1 import datasets, events, jobs, models
from api.v1 import experiments as v1_experiments
from api.v1 import runs as v1_runs
from recipes.store import Store
from resources.metadata.database import Database
from resources.metadata.tracking import Tracking
from resources.settings import Settings

log = logging.getLogger(__name__)

MLFLOW_ROUTERS: tuple[APIRouter, ...] = (
    experiments.router,
    runs.router,
    metrics.router,
    artifacts.router,
    logged_models.router,
)
"""Served below both of `MLFLOW_PREFIXES`."""

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    v1_experiments.router,
    v1_runs.router,
    events.router,
    datasets.router,
    jobs.router,
    models.router,
)
"""Served as they are."""

MLFLOW_PREFIXES = ("/api/2.0", "/ajax-api/2.0")
MLFLOW_3_PREFIXES = ("/api/3.0", "/ajax-api/3.0")


def create_app(settings: Settings) -> FastAPI:
    """The application over the settings' database and store. Connects to nothing before it is started."""
    database = Database(settings.database_url)
    store = Store(settings.store)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await run_in_threadpool(app.state.tracking.experiments.ensure_default)
        except SQLAlchemyError as error:
            # /ready says so and tries again: a database that is late must not end this process.
            log.warning("the metadata database does not answer yet: %s", error)
        yield
        database.close()

    app = FastAPI(title="Hanzo ML", lifespan=lifespan)
    app.state.settings = settings
    app.state.database = database
    app.state.store = store
    app.state.tracking = Tracking(database)
    app.state.run_artifacts = RunArtifacts(store)
    errors.install(app)
    app.add_middleware(HostGuard, allowed=LOOPBACK_NAMES | {settings.server.host})
    for prefix in MLFLOW_PREFIXES:
        for router in MLFLOW_ROUTERS:
            app.include_router(router, prefix=prefix)
    for prefix in MLFLOW_3_PREFIXES:
        app.include_router(server_info.router, prefix=prefix)
    for router in ROUTERS:
        app.include_router(router)
    return app
