"""Routes that answer with something else than JSON, and the statuses that an endpoint chooses: FastAPI sees neither."""

from collections.abc import Mapping

from api.openapi.health import Ready
from api.openapi.v1.datasets import NewDatasetVersion
from api.schemas.mlflow.responses import Message

PIECES = ("200", "206")
"""A file, or the range of it that was asked for."""

CONTENTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "GET /mlflow/artifacts/get": (PIECES, "*/*"),
    "GET /mlflow-artifacts/artifacts/{artifact_path}": (PIECES, "*/*"),
    "GET /mlflow-artifacts/artifacts/models/{name}/{number}/{path}": (PIECES, "*/*"),
    "GET /mlflow/logged-models/{model_id}/artifacts/files": (PIECES, "*/*"),
    "GET /v1/dataset-files": (PIECES, "application/octet-stream"),
    "GET /v1/datasets/{dataset_id}/preview": (("200",), "application/jsonl"),
    "GET /v1/datasets/{dataset_id}/report": (("200",), "text/html"),
    "GET /v1/jobs/{job_id}/logs": (("200",), "text/event-stream"),
    "GET /health": (("200",), "text/plain"),
    "GET /version": (("200",), "text/plain"),
}
"""Statuses and media type, by method and path, below the prefix where there is one."""
ALSO_JSON: Mapping[str, tuple[str, str, type[Message]]] = {
    "POST /v1/datasets": ("201", "a version that is new; 200 is the newest one, which holds the same", NewDatasetVersion),
    "POST /v1/datasets/raw": (
        "201",
        "a version that is new; 200 is the newest one, which holds the same",
        NewDatasetVersion,
    ),
    "GET /ready": ("503", "which part does not answer", Ready),
}
"""One more status with a JSON body of the route's own, what it is, and its message."""
