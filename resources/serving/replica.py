"""`python -m resources.serving.replica`: a replica of the inference engine on a cluster.

It pulls the wanted deployments from the API (`reconciler`) and listens on `engine.host`. Several replicas share one Service:
`/ready` decides whether this one gets requests.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from recipes.contracts.quantities import parse_duration
from resources.service_logs import configure_logs
from resources.serving.deployment_table import DeploymentState, DeploymentTable
from resources.serving.draining_server import DrainingServer
from resources.serving.file_cache import FileCache
from resources.serving.gateway import create_serving_app, describe_health, open_backend_client, open_listener
from resources.serving.reconciler import Reconciler
from resources.settings.settings import Settings

ANSWER_SECONDS = 120
"""How long requests in flight may take after the replica stops accepting new ones."""

log = logging.getLogger(__name__)


def create_replica(settings: Settings, state: DeploymentState) -> tuple[FastAPI, Reconciler]:
    """Create the application and its reconciliation loop."""
    http = open_backend_client()
    table = DeploymentTable(state, http)
    token = settings.engine.token.get_secret_value() if settings.engine.token else ""
    cache = FileCache(settings.engine_cache / "files")
    name = f"{socket.gethostname()}:{settings.engine.port}"
    api_url = settings.engine.api_url or settings.scheduler.tracking_uri or settings.tracking_uri
    reconciler = Reconciler(api_url.rstrip("/"), token, name, cache, table)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        table.restore(state.read())
        app.state.loop = asyncio.create_task(reconciler.run())
        yield
        app.state.loop.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await app.state.loop
        await reconciler.close()
        await table.close()
        await http.aclose()

    app = create_serving_app(table, http, lifespan)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Liveness: fails if the loop has died, so that the container is restarted."""
        loop: asyncio.Task[None] = app.state.loop
        if loop.done() and not reconciler.draining:
            log.error("the replica no longer follows the API", exc_info=None if loop.cancelled() else loop.exception())
            return JSONResponse({"status": "failed", "reason": "the replica no longer follows the API"}, 500)
        return JSONResponse(describe_health(table))

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Readiness: each wanted model answers, or has failed to load."""
        reason = reconciler.unready_reason()
        return JSONResponse({"ready": not reason, "reason": reason}, 503 if reason else 200)

    return app, reconciler


def main() -> None:
    try:
        settings = Settings.load()
        configure_logs(settings.logging.level, settings.logging.format)
        if settings.engine.mode != "pull":
            raise BadConfiguration("engine.mode is push: set it to pull, or start python -m resources.serving.gateway")
        listener = open_listener(settings.engine.host, settings.engine.port)
        state = DeploymentState(settings.engine_cache)
        state.read()  # detect a corrupt file before serving
    except BadConfiguration as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
    app, reconciler = create_replica(settings, state)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=ANSWER_SECONDS)
    print(f"engine listens on http://{settings.engine.host}:{settings.engine.port}", flush=True)
    DrainingServer(config, parse_duration(settings.engine.drain), reconciler.drain).run(sockets=[listener])


if __name__ == "__main__":
    main()
