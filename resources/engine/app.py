"""The gateway's HTTP endpoints: OpenAI's, the deployments and the health. Thin: validate, call the table, answer."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from resources.engine.state import State
from resources.errors import BadRequest, EngineError
from resources.serving.deployment_table import DeploymentTable
from resources.serving.messages import Deployments, DeployRequest, Refusal, Served
from resources.serving.proxy import forward, openai_response

CONNECT_SECONDS = 10


def make_app(state: State) -> FastAPI:
    """The application; it owns its deployments from startup to shutdown."""
    # No connection is kept: one that the backend closes just then would be a request that fails. The environment's
    # proxies are not asked: everything is on this machine.
    http = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    )
    table = DeploymentTable(state, http)
    app = FastAPI(title="Hanzo ML inference engine", lifespan=lifespan(state, table, http))
    app.add_exception_handler(EngineError, answer_error)
    app.add_exception_handler(RequestValidationError, answer_invalid)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        serving = [served.name for served in table.served() if served.status == "serving"]
        return {"status": "ok", "serving": serving}

    @app.get("/deployments")
    async def deployments() -> Deployments:
        return Deployments(deployments=table.served())

    @app.post("/deployments")
    async def deploy(body: DeployRequest) -> Served:
        return await table.deploy(body)

    @app.delete("/deployments/{name:path}", status_code=204)
    async def remove(name: str, deployment: int | None = None) -> None:
        await table.remove(name, deployment)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(served) for served in table.served() if served.status == "serving"]}

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await forward(request, table, http)

    return app


def lifespan(
    state: State, table: DeploymentTable, http: httpx.AsyncClient
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Restore what was served before, and end every backend at shutdown."""

    @asynccontextmanager
    async def run(_: FastAPI) -> AsyncIterator[None]:
        table.restore(state.read())
        yield
        await table.close()
        await http.aclose()

    return run


def model(served: Served) -> dict[str, Any]:
    """A deployment as OpenAI lists models."""
    created = int(served.loaded_at.timestamp()) if served.loaded_at else 0
    return {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "hanzo-ml",
        "version": served.version,
        "sha256": served.sha256,
    }


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """An engine error in the shape of the endpoint that was asked."""
    assert isinstance(error, EngineError)
    if request.url.path.startswith("/v1/"):
        return openai_response(error)
    refusal = Refusal(error_code=error.code.value, message=error.message, details=error.details)
    return JSONResponse(refusal.model_dump(mode="json"), error.status)


async def answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """The first problem of a body that does not fit, as one line."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"][1:]) or "body"
    return await answer_error(request, BadRequest(f"'{where}': {problem['msg']}"))
