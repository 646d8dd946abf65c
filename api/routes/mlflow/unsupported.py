"""Answer calls of MLflow's API that this server lacks with a 501 and an explanation.

With a 404, MLflow's clients would try an older path of the same call, which does not exist either, and then claim that the
server must be upgraded.
"""

import re
from collections.abc import Callable

from fastapi import Response
from starlette.convertors import StringConvertor, register_url_convertor

from api.auth.permissions import Permission
from api.routing import Endpoint, Router
from resources.errors import ErrorCode, HanzoError

router = Router(strict=False, include_in_schema=False)

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
SERVED = "it supports MLflow's experiments, runs, models and their files"
TRACES = "traces and assessments"
UNSUPPORTED: dict[str, dict[str, str]] = {
    "2.0": {
        **dict.fromkeys(("traces", "unified-traces", "get-online-trace-details", "get-trace-artifact"), TRACES),
        "webhooks": "webhooks",
    },
    "3.0": {
        **dict.fromkeys(("traces", "get-trace-artifact"), TRACES),
        "datasets": "evaluation datasets",
        "gateway": "AI gateway",
        **dict.fromkeys(("scorers", "scorer"), "scorers"),
        **dict.fromkeys(("issues", "label-schemas", "review-queues"), "issues, label schemas and review queues"),
        **dict.fromkeys(("prompt-optimization", "genai", "jobs"), "MLflow jobs"),
        **dict.fromkeys(("assistant", "demo"), "assistant and no demo"),
        "mcp-servers": "MCP servers",
        "skills": "skills",
    },
}
"""By API version: the path after `/mlflow/`, and what users call it. Workspaces are not listed: clients handle their
404."""


def unsupported_error(version: str, path: str) -> HanzoError:
    what = UNSUPPORTED[version][path.partition("/")[0]]
    # Not `mlflow.tracing.disable()`: it makes `log_model` of MLflow 3.17's client deadlock on its own lock.
    hint = ". Set MLFLOW_TRACE_SAMPLING_RATIO=0 in a script's environment to send none" if what == TRACES else ""
    return HanzoError(ErrorCode.NOT_IMPLEMENTED, f"This server has no {what}: {SERVED}{hint}")


for _version, _names in UNSUPPORTED.items():
    # One route for all names and everything below them: a route each would slow the server's start.
    _below = {"regex": rf"(?:{'|'.join(map(re.escape, _names))})(?:/.*)?"}
    register_url_convertor(f"not_served_{_version[0]}", type("Below", (StringConvertor,), _below)())


def unsupported_paths(*paths: str) -> Callable[[Endpoint], Endpoint]:
    """Declare an endpoint for every method; it answers all alike, and ignores the body."""

    def register(endpoint: Endpoint) -> Endpoint:
        for path in paths:
            for method in METHODS:
                router.route(
                    method,
                    path,
                    Permission.SERVER_READ,
                    read_only=True,
                    allows_jobs=True,
                    streams_body=True,
                )(endpoint)
        return endpoint

    return register


@unsupported_paths("/api/2.0/mlflow/{unserved:not_served_2}", "/ajax-api/2.0/mlflow/{unserved:not_served_2}")
async def unsupported_2(unserved: str) -> Response:
    raise unsupported_error("2.0", unserved)


@unsupported_paths("/api/3.0/mlflow/{unserved:not_served_3}", "/ajax-api/3.0/mlflow/{unserved:not_served_3}")
async def unsupported_3(unserved: str) -> Response:
    raise unsupported_error("3.0", unserved)


@router.post("/v1/traces", Permission.SERVER_READ, read_only=True, allows_jobs=True, streams_body=True)
async def no_spans() -> Response:
    # With the message at which MLflow's client stops sending spans.
    raise HanzoError(ErrorCode.NOT_IMPLEMENTED, f"REST OTLP span logging is not supported by this server: {SERVED}")
