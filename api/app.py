"""Build the application: its routes and the objects that they share.

To add routes, add one line to `MLFLOW_ROUTERS` or `ROUTERS`. How the application is served belongs to `server`.
"""

import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CollectorRegistry
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from api import errors, health
from api.artifacts.locations import ArtifactLocations
from api.artifacts.run_artifacts import RunArtifacts
from api.artifacts.verified_files import VerifiedFiles
from api.auth.audit_log import AuditLog
from api.auth.authentication import token_verifier
from api.auth.route_matching import UNMATCHED, Routes, fast_calls
from api.background_tasks import start_table_analysis, start_upload_cleanup
from api.dagster_ui.websocket_proxy import SOCKET_PATH, DagsterSocket
from api.errors import UnhandledErrors
from api.fast_path.middleware import FastPathMiddleware, FastPathResources
from api.middleware.access_control import AccessControl
from api.middleware.browser_security import LOOPBACK_NAMES, HostValidation, ReadOnlyPages
from api.middleware.request_normalization import LeadingSlashes
from api.openapi import DescribedApplication
from api.prometheus import DatabaseTotals, RequestHistogram, RequestTiming
from api.routes.mlflow import (
    artifacts,
    experiments,
    inputs_and_outputs,
    logged_models,
    metrics,
    model_versions,
    presigned_urls,
    promptlab,
    registered_models,
    run_logging,
    runs,
    unsupported,
)
from api.routes.ui import artifact_downloads, dagster, graphql, sign_in, static_files
from api.routes.v1 import (
    audit,
    dataset_checks,
    dataset_download,
    dataset_trace,
    dataset_upload,
    datasets,
    engine,
    events,
    features,
    hpo,
    job_estimate,
    job_objects,
    job_pods,
    job_uploads,
    jobs,
    models,
    pipelines,
)
from api.routes.v1 import experiments as v1_experiments
from api.routes.v1 import runs as v1_runs
from api.routing import Router, undeclared
from recipes.storage.artifact_store import Store
from recipes.storage.signed_urls import SignedTransfers
from resources.compute.backends import open_backend
from resources.metadata.artifacts.file_hashes import FileHashes
from resources.metadata.database import Database
from resources.metadata.ownership import file_organization
from resources.metadata.tracking.tracking import Tracking
from resources.metadata.writes.group_commit import RunWriter
from resources.object_store.program_scope import ProgramScopes
from resources.settings.settings import Settings

log = logging.getLogger(__name__)

MLFLOW_ROUTERS: tuple[Router, ...] = (
    experiments.router,
    runs.router,
    run_logging.router,
    metrics.router,
    model_versions.file_router,
    artifacts.router,
    presigned_urls.router,
    presigned_urls.presigned_router,
    inputs_and_outputs.router,
    logged_models.router,
    registered_models.router,
    model_versions.router,
    promptlab.router,
)
"""Served below both of `MLFLOW_PREFIXES`."""

ROUTERS: tuple[Router, ...] = (
    health.router,
    inputs_and_outputs.paths_without_slash,
    v1_experiments.router,
    v1_runs.router,
    events.router,
    audit.router,
    dataset_upload.router,
    dataset_trace.router,  # before the routes that match any name below /v1/datasets
    datasets.router,
    datasets.edits,
    dataset_download.router,
    dataset_download.link_router,
    dataset_checks.router,
    features.router,
    jobs.router,
    job_estimate.router,
    job_objects.router,
    job_pods.router,
    job_uploads.router,
    hpo.router,
    models.router,
    engine.router,
    pipelines.router,
    static_files.router,
    sign_in.router,
    artifact_downloads.router,
    graphql.router,
    dagster.router,
    unsupported.router,
)
"""Served without a prefix."""

MLFLOW_PREFIXES = ("/api/2.0", "/ajax-api/2.0")
MLFLOW_3_PREFIXES = ("/api/3.0", "/ajax-api/3.0")
READERS = 8
"""Threads for the calls of `api.fast_path.reads`: more gain nothing, and each holds a connection while it reads."""

NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""Disables FastAPI's OpenTelemetry hooks, which would look up a provider for every request."""


def create_app(settings: Settings) -> FastAPI:
    """Build the application over the settings' database and store.

    It connects to nothing before it is started.
    """
    database = Database(settings.database_url, settings.database.connect_seconds)
    store = Store(settings.store, settings.storage.variables)
    writer = RunWriter(database)
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
    audit_log = AuditLog(database)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await run_in_threadpool(app.state.tracking.experiments.ensure_default)
            app.state.database_seen = True
        except SQLAlchemyError as error:
            # /ready reports it and retries: a late database must not end this process.
            log.warning("the metadata database does not answer yet: %s", error)
        stopped = threading.Event()
        start_upload_cleanup(settings.store, settings.storage.variables, stopped)
        start_table_analysis(database, stopped)
        async with audit_log.running():
            yield
        stopped.set()
        await run_in_threadpool(writer.close)
        await run_in_threadpool(readers.shutdown)
        await app.state.dagster_ui.close()
        database.close()

    app = DescribedApplication(
        title="Hanzo ML",
        lifespan=lifespan,
        responses=errors.RESPONSES,
        telemetry=NO_TELEMETRY,
    )
    app.state.settings = settings
    app.state.database = database
    app.state.database_seen = False
    app.state.store = store
    app.state.compute = open_backend(settings)
    app.state.tracking = Tracking(database)
    app.state.probes = health.make_probes(app, app.state.tracking, database, store)
    app.state.verified_files = VerifiedFiles(store, FileHashes(database), partial(file_organization, database))
    app.state.run_artifacts = RunArtifacts(app.state.verified_files)
    app.state.program_scopes = ProgramScopes(store)
    app.state.signed_transfers = SignedTransfers(
        settings.store, settings.storage.variables, settings.storage.public_endpoint
    )
    app.state.dagster_ui = dagster.open_dagster_ui(settings, database, audit_log)
    app.state.artifact_locations = ArtifactLocations(database, app.state.verified_files)
    errors.install_error_handlers(app)
    for prefix in MLFLOW_PREFIXES:
        for router in MLFLOW_ROUTERS:
            router.include_in(app, prefix)
    for prefix in MLFLOW_3_PREFIXES:
        health.server_info_router.include_in(app, prefix)
    for router in ROUTERS:
        router.include_in(app)
    if missing := undeclared(app):
        raise TypeError(
            f"routes without a declared permission: {', '.join(missing)}: declare them with `api.routing.Router`"
        )
    fast = FastPathResources(app.state.tracking, writer, readers)
    app.add_middleware(FastPathMiddleware, calls=fast_calls(app, fast))
    app.add_middleware(ReadOnlyPages)
    protect(app, settings, database, audit_log)
    return app


def protect(app: FastAPI, settings: Settings, database: Database, audit_log: AuditLog) -> None:
    """Add the middleware of all requests, innermost first, to an application with all its routes."""
    routes = app.state.routes = Routes(app)
    registry = app.state.prometheus = CollectorRegistry()
    registry.register(DatabaseTotals(database, settings.store, settings.scheduler.gpu_types))
    templates = (route.template for route in routes.all)
    histogram = app.state.request_histogram = RequestHistogram([*templates, UNMATCHED], settings.server.workers)
    registry.register(histogram)
    url, access = settings.dagster.url, app.state.dagster_ui.access
    websockets = {SOCKET_PATH: DagsterSocket(url, access)} if url else {}
    app.add_middleware(
        AccessControl,
        routes=routes,
        tokens=token_verifier(settings),
        database=database,
        audit_log=audit_log,
        max_body_bytes=settings.server.max_body_bytes,
        websockets=websockets,
        engine_token=settings.engine.token,
    )
    app.add_middleware(UnhandledErrors)
    app.add_middleware(HostValidation, allowed={*LOOPBACK_NAMES, settings.server.host, *settings.server.allowed_hosts})
    app.add_middleware(RequestTiming, routes=routes, histogram=histogram)
    app.add_middleware(LeadingSlashes)
