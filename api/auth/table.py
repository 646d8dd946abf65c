"""What every route needs. A route that is not listed here is refused to everybody while sign-in is on.

Routes are `METHOD TEMPLATE`; `/mlflow...` is served below each of `MLFLOW_PREFIXES`, and `/v1/...` may be below `/api` too
(checklist Z7). The names of path parameters are for the reader: only the shape of a template counts.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from api.auth.permissions import Permission as P

MLFLOW_PREFIXES = ("/api/2.0", "/ajax-api/2.0")
V1_PREFIXES = ("", "/api")
PROBES = frozenset(f"{method} {path}" for method in ("GET", "HEAD") for path in ("/alive", "/ready", "/health"))
OPEN = PROBES | {"GET /v1/dataset-files"}
"""Probes (row W6, checklist Z21), and signed links, which are their own permission. The metrics have a port of their own."""

NOT_SERVED = (
    *(
        f"{method} {prefix}/mlflow/{{unserved}}"
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        for prefix in ("", "/api/3.0", "/ajax-api/3.0")
    ),
    "POST /v1/traces",
)
"""They tell everybody the same, and read nothing of what they are sent (`api.routes.mlflow.unsupported`)."""

NEEDS: dict[P, tuple[str, ...]] = {
    P.SERVER_READ: (
        "GET /version",
        "GET /openapi.json",
        "GET /docs",
        "GET /docs/oauth2-redirect",
        "GET /redoc",
        "GET /",
        "GET /first_visit.js",
        "GET /login",
        "POST /login",
        "POST /logout",
        "GET /static-files/{path}",
        "GET /api/3.0/mlflow/server-info",
        "GET /ajax-api/3.0/mlflow/server-info",
        "GET /ajax-api/2.0/mlflow/gateway-proxy",
        "POST /ajax-api/2.0/mlflow/gateway-proxy",
        "GET /ajax-api/3.0/mlflow/ui-telemetry",
        "POST /ajax-api/3.0/mlflow/ui-telemetry",
        "GET /v1/addresses",
        "GET /v1/events",
        "GET /v1/heartbeats",
        *NOT_SERVED,
    ),
    P.EXPERIMENTS_READ: (
        "GET /mlflow/experiments/get",
        "GET /mlflow/experiments/get-by-name",
        "GET /mlflow/experiments/search",
        "POST /mlflow/experiments/search",
        "POST /mlflow/experiments/search-datasets",
        "POST /api/2.0mlflow/experiments/search-datasets",
        "POST /ajax-api/2.0mlflow/experiments/search-datasets",
        "GET /mlflow/runs/get",
        "POST /mlflow/runs/search",
        "GET /mlflow/metrics/get-history",
        "GET /mlflow/metrics/get-history-bulk",
        "GET /mlflow/metrics/get-history-bulk-interval",
        "GET /mlflow/artifacts/list",
        "POST /mlflow/artifacts/presigned-download-url",
        "GET /mlflow-artifacts/artifacts",
        "GET /mlflow-artifacts/artifacts/{artifact_path}",
        "GET /mlflow-artifacts/presigned/{artifact_path}",
        "GET /mlflow/logged-models/{model_id}",
        "POST /mlflow/logged-models/search",
        "GET /mlflow/logged-models/{model_id}/artifacts/directories",
        "GET /mlflow/logged-models/{model_id}/artifacts/files",
        "GET /get-artifact",
        "GET /mlflow/artifacts/get",
        "GET /graphql",
        "POST /graphql",
        "GET /v1/experiments",
        "GET /v1/experiments/{experiment_id}",
        "GET /v1/experiments/{experiment_id}/runs",
        "GET /v1/experiments/{experiment_id}/runs/{run_id}",
        "GET /v1/runs/compare",
        "GET /v1/runs/{run_id}",
        "GET /v1/runs/{run_id}/replay",
    ),
    P.EXPERIMENTS_WRITE: (
        "POST /mlflow/experiments/create",
        "POST /mlflow/experiments/update",
        "POST /mlflow/experiments/set-experiment-tag",
        "POST /mlflow/experiments/delete-experiment-tag",
        "POST /mlflow/runs/create",
        "POST /mlflow/runs/update",
        "POST /mlflow/runs/log-metric",
        "POST /mlflow/runs/log-parameter",
        "POST /mlflow/runs/log-batch",
        "POST /mlflow/runs/set-tag",
        "POST /mlflow/runs/delete-tag",
        "POST /mlflow/runs/log-model",
        "POST /mlflow/runs/log-inputs",
        "POST /mlflow/runs/outputs",
        "POST /mlflow/runs/create-promptlab-run",
        "PUT /mlflow-artifacts/artifacts/{artifact_path}",
        "POST /mlflow-artifacts/mpu/create/{artifact_path}",
        "POST /mlflow-artifacts/mpu/complete/{artifact_path}",
        "POST /mlflow-artifacts/mpu/abort/{artifact_path}",
        "POST /mlflow/artifacts/presigned-upload-url",
        "POST /mlflow/upload-artifact",
        "POST /mlflow/logged-models",
        "PATCH /mlflow/logged-models/{model_id}",
        "PATCH /mlflow/logged-models/{model_id}/tags",
        "DELETE /mlflow/logged-models/{model_id}/tags/{tag_key}",
        "POST /mlflow/logged-models/{model_id}/params",
        "POST /v1/experiments",
        "POST /v1/runs",
        "POST /v1/runs/{run_id}/metrics",
        "POST /v1/runs/{run_id}/params",
        "POST /v1/runs/{run_id}/artifacts",
        "PATCH /v1/runs/{run_id}/status",
    ),
    P.EXPERIMENTS_DELETE: (
        "POST /mlflow/experiments/delete",
        "POST /mlflow/experiments/restore",
        "POST /mlflow/runs/delete",
        "POST /mlflow/runs/restore",
        "DELETE /mlflow-artifacts/artifacts/{artifact_path}",
        "DELETE /mlflow/logged-models/{model_id}",
        "DELETE /v1/experiments/{experiment_id}",
        "DELETE /v1/runs/{run_id}",
    ),
    P.DATASETS_READ: (
        "GET /v1/datasets",
        "GET /v1/datasets/{dataset_id}",
        "GET /v1/datasets/{dataset_id}/preview",
        "GET /v1/datasets/{dataset_id}/download",
        "GET /v1/datasets/{dataset_id}/diff",
        "GET /v1/datasets/{dataset_id}/lineage",
        "GET /v1/datasets/trace",
        "POST /v1/datasets/trace",
        "GET /v1/datasets/{dataset_id}/checks",
        "GET /v1/datasets/{dataset_id}/report",
        "GET /v1/features/{name}/{key}",
        "POST /v1/features/{name}/transform",
    ),
    P.DATASETS_WRITE: (
        "POST /v1/datasets",
        "POST /v1/datasets/raw",
        "POST /v1/datasets/{dataset_id}/prepare",
        "POST /v1/datasets/{dataset_id}/checks",
        "PATCH /v1/datasets/{dataset_id}",
    ),
    P.DATASETS_DELETE: ("DELETE /v1/datasets/{dataset_id}",),
    P.JOBS_READ: ("GET /v1/jobs", "GET /v1/jobs/{job_id}", "GET /v1/jobs/{job_id}/logs", "POST /v1/jobs/estimate"),
    P.JOBS_SUBMIT: ("POST /v1/jobs", "POST /v1/pipelines/runs", "POST /v1/runs/{run_id}/replay"),
    P.JOBS_CANCEL: ("POST /v1/jobs/{job_id}/cancel", "POST /v1/jobs/{job_id}/resume"),
    P.JOBS_DELETE: ("DELETE /v1/jobs/{job_id}",),
    P.MODELS_READ: (
        "GET /mlflow/registered-models/get",
        "GET /mlflow/registered-models/search",
        "GET /mlflow/registered-models/get-latest-versions",
        "POST /mlflow/registered-models/get-latest-versions",
        "GET /mlflow/registered-models/alias",
        "GET /mlflow/model-versions/get",
        "GET /mlflow/model-versions/search",
        "GET /mlflow/model-versions/get-download-uri",
        "GET /model-versions/get-artifact",
        "GET /mlflow-artifacts/artifacts/models/{name}/{number}/{path}",
        "GET /v1/models",
        "GET /v1/models/{name}/versions",
        "GET /v1/models/{name}/versions/{number}",
        "GET /v1/models/{name}/versions/{number}/proof",
        "GET /v1/models/{name}/versions/{number}/data",
    ),
    P.MODELS_REGISTER: (
        "POST /mlflow/registered-models/create",
        "PATCH /mlflow/registered-models/update",
        "POST /mlflow/registered-models/set-tag",
        "DELETE /mlflow/registered-models/delete-tag",
        "POST /mlflow/model-versions/create",
        "PATCH /mlflow/model-versions/update",
        "POST /mlflow/model-versions/set-tag",
        "DELETE /mlflow/model-versions/delete-tag",
        "POST /v1/models",
        "POST /v1/models/{name}/versions",
        "POST /v1/models/register",
    ),
    # An alias is how a loader finds the version that it serves: to move one is to promote.
    P.MODELS_PROMOTE: (
        "POST /mlflow/model-versions/transition-stage",
        "POST /mlflow/registered-models/alias",
        "DELETE /mlflow/registered-models/alias",
        "PATCH /v1/models/{name}/versions/{number}/stage",
        "PUT /v1/models/{name}/versions/{number}/stage",
    ),
    P.MODELS_ARCHIVE: (
        "POST /mlflow/registered-models/rename",
        "DELETE /mlflow/registered-models/delete",
        "DELETE /mlflow/model-versions/delete",
        "DELETE /v1/models/{name}/deployment",
    ),
    P.HPO_READ: ("GET /v1/hpo", "GET /v1/hpo/{sweep_id}", "GET /v1/hpo/{sweep_id}/trials"),
    P.HPO_CREATE: ("POST /v1/hpo",),
    P.HPO_CANCEL: ("POST /v1/hpo/{sweep_id}/cancel",),
    P.AUDIT_READ: ("GET /v1/audit",),
}

QUESTIONS = frozenset(
    {
        "POST /mlflow/experiments/search",
        "POST /mlflow/experiments/search-datasets",
        "POST /api/2.0mlflow/experiments/search-datasets",
        "POST /ajax-api/2.0mlflow/experiments/search-datasets",
        "POST /mlflow/runs/search",
        "POST /mlflow/logged-models/search",
        "POST /mlflow/registered-models/get-latest-versions",
        "POST /mlflow/artifacts/presigned-download-url",
        "POST /ajax-api/2.0/mlflow/gateway-proxy",
        "POST /ajax-api/3.0/mlflow/ui-telemetry",
        "POST /graphql",
        "POST /login",
        "POST /logout",
        "POST /v1/datasets/trace",
        "POST /v1/features/{name}/transform",
        "POST /v1/jobs/estimate",
        *NOT_SERVED,
    }
)
"""They change nothing here, though asked by POST."""
OPENS_A_DATASET = ("GET /v1/datasets/{dataset_id}/", "GET /v1/datasets/trace", "POST /v1/datasets/trace")
"""How reads begin that are audited all the same: what is in a dataset, not that it is there (row X4)."""
LOGGING = frozenset(
    {
        "POST /mlflow/runs/log-metric",
        "POST /mlflow/runs/log-parameter",
        "POST /mlflow/runs/log-batch",
        "POST /mlflow/runs/set-tag",
        "POST /mlflow/runs/delete-tag",
        "POST /v1/runs/{run_id}/metrics",
        "POST /v1/runs/{run_id}/params",
    }
)
"""What a training script calls many times a second: audited by count (see `api.auth.audit_log`)."""
SERVING = frozenset({"GET /v1/features/{name}/{key}", "POST /v1/features/{name}/transform"})
"""Reads of what is in a dataset that a model's server asks for many times a second: audited by count too."""
CHECKS_ITSELF = frozenset(
    {
        "GET /graphql",
        "POST /graphql",
        "POST /mlflow/runs/log-metric",
        "POST /mlflow/runs/log-parameter",
        "POST /mlflow/runs/log-batch",
        "POST /mlflow/runs/set-tag",
    }
)
"""The endpoint compares the organization of what it finds with `scope["state"]["caller"].organization` itself, and the guard
does not read the body. Such an endpoint puts the run's id in `scope["state"]["run_id"]` for the audit log."""
MAKES_A_MODEL = frozenset(
    {
        "POST /mlflow/registered-models/create",
        "POST /v1/models",
        "POST /v1/models/{name}/versions",
        "POST /v1/models/register",
        "POST /v1/jobs",
        "POST /v1/pipelines/runs",
    }
)
"""A registered model that these name may be new."""
FOR_JOBS = frozenset(
    {
        "GET /version",
        "GET /api/3.0/mlflow/server-info",
        "GET /ajax-api/3.0/mlflow/server-info",
        "GET /mlflow/experiments/get",
        "GET /mlflow/runs/get",
        "GET /mlflow/metrics/get-history",
        "GET /mlflow/artifacts/list",
        "GET /mlflow-artifacts/artifacts",
        "GET /mlflow-artifacts/artifacts/{artifact_path}",
        "GET /mlflow/logged-models/{model_id}",
        "GET /mlflow/logged-models/{model_id}/artifacts/directories",
        "GET /v1/runs/{run_id}",
        "GET /v1/experiments/{experiment_id}/runs/{run_id}",
        "POST /mlflow/runs/create",
        "POST /mlflow/runs/update",
        "POST /mlflow/runs/log-metric",
        "POST /mlflow/runs/log-parameter",
        "POST /mlflow/runs/log-batch",
        "POST /mlflow/runs/set-tag",
        "POST /mlflow/runs/delete-tag",
        "POST /mlflow/runs/log-model",
        "POST /mlflow/runs/log-inputs",
        "POST /mlflow/runs/outputs",
        "PUT /mlflow-artifacts/artifacts/{artifact_path}",
        "POST /mlflow-artifacts/mpu/create/{artifact_path}",
        "POST /mlflow-artifacts/mpu/complete/{artifact_path}",
        "POST /mlflow-artifacts/mpu/abort/{artifact_path}",
        "POST /mlflow/logged-models",
        "PATCH /mlflow/logged-models/{model_id}",
        "PATCH /mlflow/logged-models/{model_id}/tags",
        "POST /mlflow/logged-models/{model_id}/params",
        "POST /v1/runs/{run_id}/metrics",
        "POST /v1/runs/{run_id}/params",
        "POST /v1/runs/{run_id}/artifacts",
        "PATCH /v1/runs/{run_id}/status",
        "GET /v1/datasets/{dataset_id}",
        "GET /v1/datasets/{dataset_id}/preview",
        "GET /v1/datasets/{dataset_id}/download",
        "GET /mlflow/registered-models/get",
        "GET /mlflow/registered-models/alias",
        "GET /mlflow/model-versions/get",
        "GET /mlflow/model-versions/get-download-uri",
        "GET /mlflow-artifacts/artifacts/models/{name}/{number}/{path}",
        "GET /v1/models/{name}/versions",
        "GET /v1/models/{name}/versions/{number}",
        *NOT_SERVED,
    }
)
"""What a job's own token is good for, with the objects that are the job's: nothing that lists or searches."""
UPLOADS = frozenset(
    {
        "POST /v1/datasets",
        "POST /v1/datasets/raw",
        "POST /v1/runs/{run_id}/artifacts",
        "PUT /mlflow-artifacts/artifacts/{artifact_path}",
        "POST /mlflow/upload-artifact",
        *NOT_SERVED,
    }
)
"""The body is a file: streamed, of any size, and names no object. Or it is not read at all."""


class Audit(StrEnum):
    NONE = "none"
    EACH = "each"
    COUNTED = "counted"
    NOTED = "noted"
    """Counted in memory first, as calls that fail are: it changes nothing, and its answer does not wait for the log."""


@dataclass(frozen=True)
class Rule:
    permission: P
    audit: Audit
    checks_itself: bool
    makes_a_model: bool
    uploads: bool
    writes: bool
    for_jobs: bool


def needed(rule: Rule, body: Any) -> P:
    """What a call needs: to register a version straight into a stage is to promote it."""
    if rule.permission is P.MODELS_REGISTER and isinstance(body, dict) and body.get("stage") not in (None, "", "none"):
        return P.MODELS_PROMOTE
    return rule.permission


def shape(route: str) -> str:
    """`GET /v1/jobs/{job_id}` as `GET /v1/jobs/{}`."""
    return re.sub(r"\{[^}]*\}", "{}", route)


def spellings(route: str) -> list[str]:
    """The shapes of a listed route as they are served."""
    method, path = shape(route).split(" ", 1)
    prefixes = MLFLOW_PREFIXES if path.startswith("/mlflow") else V1_PREFIXES if path.startswith("/v1/") else ("",)
    return [f"{method} {prefix}{path}" for prefix in prefixes]


def rule(permission: P, route: str) -> Rule:
    writes = not route.startswith("GET ") and route not in QUESTIONS
    audit = Audit.EACH if writes or route.startswith(OPENS_A_DATASET) else Audit.NONE
    audit = Audit.COUNTED if route in LOGGING else Audit.NOTED if route in SERVING else audit
    return Rule(
        permission=permission,
        audit=audit,
        checks_itself=route in CHECKS_ITSELF,
        makes_a_model=route in MAKES_A_MODEL,
        uploads=route in UPLOADS,
        writes=writes,
        for_jobs=route in FOR_JOBS,
    )


RULES: dict[str, Rule] = {
    spelling: rule(permission, route)
    for permission, routes in NEEDS.items()
    for route in routes
    for spelling in spellings(route)
}
