"""`python -m resources.serving.gateway`: HTTP gateway of the local inference engine, on loopback only."""

import argparse
import errno
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias, get_args

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.errors import BadRequest, EngineError
from resources.service_logs import Format, Level, configure_logs
from resources.serving.client import Deployments, DeployRequest, Refusal, Served
from resources.serving.deployment_table import DeploymentState, DeploymentTable
from resources.serving.proxy import forward_request, openai_response

# Thin HTTP endpoints for OpenAI's API, deployments and health: validate, call the table, respond.

CONNECT_TIMEOUT_SECONDS = 10
Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(state: DeploymentState) -> FastAPI:
    """Create the application, which owns its deployments from startup to shutdown."""
    http = open_backend_client()
    table = DeploymentTable(state, http)
    app = create_serving_app(table, http, lifespan(state, table, http))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return describe_health(table)

    @app.post("/deployments")
    async def deploy(body: DeployRequest) -> Served:
        return await table.deploy(body)

    @app.delete("/deployments/{name:path}", status_code=204)
    async def remove(name: str, deployment: int | None = None) -> None:
        await table.remove(name, deployment)

    return app


def open_backend_client() -> httpx.AsyncClient:
    """Open the HTTP client for the backends on this machine."""
    # No keep-alive: a request fails if the backend closes the connection at that moment. The environment's proxies are
    # ignored, because everything is on this machine.
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    )


def create_serving_app(table: DeploymentTable, http: httpx.AsyncClient, lifespan: Lifespan) -> FastAPI:
    """Create an application with the endpoints that every engine has."""
    app = FastAPI(title="Hanzo ML inference engine", lifespan=lifespan)
    app.add_exception_handler(EngineError, handle_engine_error)
    app.add_exception_handler(RequestValidationError, handle_invalid_request)

    @app.get("/deployments")
    async def deployments() -> Deployments:
        return Deployments(deployments=table.served())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [openai_model(served) for served in table.served() if served.status == "serving"]}

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await forward_request(request, table, http)

    return app


def describe_health(table: DeploymentTable) -> dict[str, Any]:
    return {"status": "ok", "serving": [served.name for served in table.served() if served.status == "serving"]}


def lifespan(state: DeploymentState, table: DeploymentTable, http: httpx.AsyncClient) -> Lifespan:
    """Restore deployments at startup, and end every backend at shutdown."""

    @asynccontextmanager
    async def run(_: FastAPI) -> AsyncIterator[None]:
        table.restore(state.read())
        yield
        await table.close()
        await http.aclose()

    return run


def openai_model(served: Served) -> dict[str, Any]:
    """Return a deployment in the format of OpenAI's model list."""
    created = int(served.loaded_at.timestamp()) if served.loaded_at else 0
    return {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "hanzo-ml",
        "version": served.version,
        "sha256": served.sha256,
    }


async def handle_engine_error(request: Request, error: Exception) -> JSONResponse:
    """Return an engine error in the format of the requested endpoint."""
    assert isinstance(error, EngineError)
    if request.url.path.startswith("/v1/"):
        return openai_response(error)
    refusal = Refusal(error_code=error.code.value, message=error.message, details=error.details)
    return JSONResponse(refusal.model_dump(mode="json"), error.status)


async def handle_invalid_request(request: Request, error: Exception) -> JSONResponse:
    """Return the first problem of an invalid body as one line."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"][1:]) or "body"
    return await handle_engine_error(request, BadRequest(f"'{where}': {problem['msg']}"))


# The process locks its port and state folder, or prints in one line why it cannot.

HOST = "127.0.0.1"
SHUTDOWN_TIMEOUT_SECONDS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8043)
    parser.add_argument("--state-dir", type=Path, required=True, help="folder with the list of deployments")
    parser.add_argument("--log-level", choices=get_args(Level), default="info")
    parser.add_argument("--log-format", choices=get_args(Format), default="text")
    arguments = parser.parse_args()
    configure_logs(arguments.log_level, arguments.log_format)
    try:
        listener = open_listener(HOST, arguments.port)
        state = DeploymentState(arguments.state_dir)
        state.read()  # detect a corrupt file before serving
    except BadConfiguration as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
    config = uvicorn.Config(
        create_app(state), log_config=None, access_log=False, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_SECONDS
    )
    print(f"engine listens on http://{HOST}:{arguments.port}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on the port.

    Raises:
        BadConfiguration: another process uses it, or it cannot be opened.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
    try:
        listener.bind((host, port))
        listener.listen()  # before uvicorn does: only listening reserves the port
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise BadConfiguration(f"port {port} is in use: end the process that has it, or choose another port") from None
        raise BadConfiguration(f"cannot listen on port {port}: {error}") from None
    return listener


if __name__ == "__main__":
    main()
