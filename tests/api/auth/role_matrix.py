"""Permissions by role and route, as the specification defines them.

Written by hand, not derived from the routes' declarations, which have to agree with it.

A line is a route below its first prefix, and the callers that it permits: `a` ml-admin, `r` ml-researcher, `v` ml-viewer,
`j` a job with its own token, for the job's own objects, `p` the pods of a program on a cluster with their program's token,
for that program alone, `e` the engine's replicas with their token, `n` a caller without a token. A role's permissions apply
within its own organization.
"""

PROBES_AND_PAGES = """
enarvj GET /alive
enarvj GET /ready
enarvj GET /health
arvj  GET /version
arvj  GET /api/3.0/mlflow/server-info
arv   GET /openapi.json
arv   GET /docs
arv   GET /docs/oauth2-redirect
arv   GET /redoc
arv   GET /
arv   GET /first_visit.js
arv   GET /static-files/{path}
arv   GET /login
arv   POST /login
arv   POST /logout
arv   GET /api/2.0/mlflow/gateway-proxy
arv   POST /api/2.0/mlflow/gateway-proxy
arv   GET /api/3.0/mlflow/ui-telemetry
arv   POST /api/3.0/mlflow/ui-telemetry
earvj GET /api/2.0/mlflow/{unserved}
earvj POST /api/2.0/mlflow/{unserved}
earvj PUT /api/2.0/mlflow/{unserved}
earvj PATCH /api/2.0/mlflow/{unserved}
earvj DELETE /api/2.0/mlflow/{unserved}
earvj GET /api/3.0/mlflow/{unserved}
earvj POST /api/3.0/mlflow/{unserved}
earvj PUT /api/3.0/mlflow/{unserved}
earvj PATCH /api/3.0/mlflow/{unserved}
earvj DELETE /api/3.0/mlflow/{unserved}
arvj  POST /v1/traces
arv   GET /v1/addresses
arv   GET /v1/heartbeats
arv   GET /v1/events
a     GET /v1/audit
"""
"""Probes are open; every other route requires a token."""

DAGSTER = """
a     GET /dagster
a     GET /dagster/{path}
a     POST /dagster/{path}
"""
"""With several organizations, as here. `tests.api.dagster_ui` covers the permissions of each role with one organization."""

EXPERIMENTS = """
arvj  GET /api/2.0/mlflow/experiments/get
arv   GET /api/2.0/mlflow/experiments/get-by-name
arv   GET /api/2.0/mlflow/experiments/search
arv   POST /api/2.0/mlflow/experiments/search
arv   POST /api/2.0/mlflow/experiments/search-datasets
ar    POST /api/2.0/mlflow/experiments/create
ar    POST /api/2.0/mlflow/experiments/update
ar    POST /api/2.0/mlflow/experiments/set-experiment-tag
ar    POST /api/2.0/mlflow/experiments/delete-experiment-tag
a     POST /api/2.0/mlflow/experiments/delete
a     POST /api/2.0/mlflow/experiments/restore
arv   GET /v1/experiments
ar    POST /v1/experiments
arv   GET /v1/experiments/{experiment}
arv   GET /v1/experiments/{experiment}/runs
arvj  GET /v1/experiments/{experiment}/runs/{run}
a     DELETE /v1/experiments/{experiment}
arv   GET /graphql
arv   POST /graphql
"""

RUNS = """
arvj  GET /api/2.0/mlflow/runs/get
arv   POST /api/2.0/mlflow/runs/search
arvj  GET /api/2.0/mlflow/metrics/get-history
arv   GET /api/2.0/mlflow/metrics/get-history-bulk
arv   GET /api/2.0/mlflow/metrics/get-history-bulk-interval
arj   POST /api/2.0/mlflow/runs/create
arj   POST /api/2.0/mlflow/runs/update
arj   POST /api/2.0/mlflow/runs/log-metric
arj   POST /api/2.0/mlflow/runs/log-batch
arj   POST /api/2.0/mlflow/runs/log-parameter
arj   POST /api/2.0/mlflow/runs/set-tag
arj   POST /api/2.0/mlflow/runs/delete-tag
arj   POST /api/2.0/mlflow/runs/log-inputs
arj   POST /api/2.0/mlflow/runs/log-model
arj   POST /api/2.0/mlflow/runs/outputs
ar    POST /api/2.0/mlflow/runs/create-promptlab-run
a     POST /api/2.0/mlflow/runs/delete
a     POST /api/2.0/mlflow/runs/restore
arv   GET /v1/runs/compare
arvj  GET /v1/runs/{run}
ar    POST /v1/runs
arj   POST /v1/runs/{run}/metrics
arj   POST /v1/runs/{run}/params
arj   POST /v1/runs/{run}/artifacts
arj   PATCH /v1/runs/{run}/status
a     DELETE /v1/runs/{run}
arv   GET /v1/runs/{run}/replay
ar    POST /v1/runs/{run}/replay
"""
"""Runs are part of their experiments; replaying one submits a job."""

ARTIFACTS = """
arvj  GET /api/2.0/mlflow/artifacts/list
arvj  GET /api/2.0/mlflow-artifacts/artifacts
arvj  GET /api/2.0/mlflow-artifacts/artifacts/{path}
arj   PUT /api/2.0/mlflow-artifacts/artifacts/{path}
a     DELETE /api/2.0/mlflow-artifacts/artifacts/{path}
arj   POST /api/2.0/mlflow-artifacts/mpu/create/{path}
arj   POST /api/2.0/mlflow-artifacts/mpu/complete/{path}
arj   POST /api/2.0/mlflow-artifacts/mpu/abort/{path}
arv   GET /api/2.0/mlflow-artifacts/presigned/{path}
arv   POST /api/2.0/mlflow/artifacts/presigned-download-url
ar    POST /api/2.0/mlflow/artifacts/presigned-upload-url
ar    POST /api/2.0/mlflow/upload-artifact
arv   GET /api/2.0/mlflow/artifacts/get
arv   GET /get-artifact
"""

LOGGED_MODELS = """
arvj  GET /api/2.0/mlflow/logged-models/{id}
arv   POST /api/2.0/mlflow/logged-models/search
arvj  GET /api/2.0/mlflow/logged-models/{id}/artifacts/directories
arv   GET /api/2.0/mlflow/logged-models/{id}/artifacts/files
arj   POST /api/2.0/mlflow/logged-models
arj   PATCH /api/2.0/mlflow/logged-models/{id}
arj   PATCH /api/2.0/mlflow/logged-models/{id}/tags
ar    DELETE /api/2.0/mlflow/logged-models/{id}/tags/{key}
arj   POST /api/2.0/mlflow/logged-models/{id}/params
a     DELETE /api/2.0/mlflow/logged-models/{id}
"""
"""Logged models belong to their experiments: none of them is in the registry."""

DATASETS = """
arv   GET /v1/datasets
arvj  GET /v1/datasets/{dataset}
arvj  GET /v1/datasets/{dataset}/preview
arvj  GET /v1/datasets/{dataset}/download
arv   GET /v1/datasets/{dataset}/diff
arv   GET /v1/datasets/{dataset}/lineage
arv   GET /v1/datasets/{dataset}/checks
arv   GET /v1/datasets/{dataset}/report
arv   GET /v1/datasets/trace
arv   POST /v1/datasets/trace
ar    POST /v1/datasets
ar    POST /v1/datasets/raw
ar    POST /v1/datasets/{dataset}/prepare
ar    POST /v1/datasets/{dataset}/checks
ar    PATCH /v1/datasets/{dataset}
a     DELETE /v1/datasets/{dataset}
arv   GET /v1/features/{name}/{key}
arv   POST /v1/features/{name}/transform
enarvj GET /v1/dataset-files
"""
"""The last is a signed link, which is its own permission."""

JOBS = """
arv   GET /v1/jobs
arv   GET /v1/jobs/{job}
arv   GET /v1/jobs/{job}/logs
arv   POST /v1/jobs/estimate
ar    POST /v1/jobs
ar    POST /v1/pipelines/runs
ar    POST /v1/jobs/{job}/cancel
ar    POST /v1/jobs/{job}/resume
a     DELETE /v1/jobs/{job}
"""
"""A researcher cancels only their own jobs, which `test_routes` covers."""

PROGRAMS = """
p     POST /v1/jobs/{job}/programs/{program}/attempts
p     POST /v1/jobs/{job}/programs/{program}/attempts/{attempt}/nodes
p     POST /v1/jobs/{job}/programs/{program}/attempts/{attempt}/exit
p     POST /v1/jobs/{job}/programs/{program}/objects/addresses
p     POST /v1/jobs/{job}/programs/{program}/objects/head
p     POST /v1/jobs/{job}/programs/{program}/objects/list
p     POST /v1/jobs/{job}/programs/{program}/objects/delete
p     POST /v1/jobs/{job}/programs/{program}/objects/copy
p     POST /v1/jobs/{job}/programs/{program}/objects/uploads
p     POST /v1/jobs/{job}/programs/{program}/objects/uploads/parts
p     POST /v1/jobs/{job}/programs/{program}/objects/uploads/complete
p     POST /v1/jobs/{job}/programs/{program}/objects/uploads/abort
p     PUT /v1/jobs/{job}/programs/{program}/objects/content
p     GET /v1/jobs/{job}/programs/{program}/objects/content
"""
"""`test_job_objects` covers which objects a program reaches."""

MODELS = """
arvj  GET /api/2.0/mlflow/registered-models/get
arv   GET /api/2.0/mlflow/registered-models/search
arv   GET /api/2.0/mlflow/registered-models/get-latest-versions
arv   POST /api/2.0/mlflow/registered-models/get-latest-versions
arvj  GET /api/2.0/mlflow/registered-models/alias
arvj  GET /api/2.0/mlflow/model-versions/get
arv   GET /api/2.0/mlflow/model-versions/search
arvj  GET /api/2.0/mlflow/model-versions/get-download-uri
arv   GET /model-versions/get-artifact
arvj  GET /api/2.0/mlflow-artifacts/artifacts/models/{name}/{number}/{path}
arv   GET /v1/models
arvj  GET /v1/models/{name}/versions
arvj  GET /v1/models/{name}/versions/{number}
arv   GET /v1/models/{name}/versions/{number}/proof
arv   GET /v1/models/{name}/versions/{number}/data
ar    POST /api/2.0/mlflow/registered-models/create
ar    PATCH /api/2.0/mlflow/registered-models/update
ar    POST /api/2.0/mlflow/registered-models/set-tag
ar    DELETE /api/2.0/mlflow/registered-models/delete-tag
ar    POST /api/2.0/mlflow/model-versions/create
ar    PATCH /api/2.0/mlflow/model-versions/update
ar    POST /api/2.0/mlflow/model-versions/set-tag
ar    DELETE /api/2.0/mlflow/model-versions/delete-tag
ar    POST /v1/models
ar    POST /v1/models/{name}/versions
ar    POST /v1/models/register
a     POST /api/2.0/mlflow/registered-models/rename
a     DELETE /api/2.0/mlflow/registered-models/delete
a     DELETE /api/2.0/mlflow/model-versions/delete
a     POST /api/2.0/mlflow/registered-models/alias
a     DELETE /api/2.0/mlflow/registered-models/alias
a     POST /api/2.0/mlflow/model-versions/transition-stage
a     PATCH /v1/models/{name}/versions/{number}/stage
a     PUT /v1/models/{name}/versions/{number}/stage
a     DELETE /v1/models/{name}/deployment
"""
"""Registering means adding and describing; moving a name that others load by means promoting or archiving."""

SWEEPS = """
arv   GET /v1/hpo
arv   GET /v1/hpo/{sweep}
arv   GET /v1/hpo/{sweep}/trials
ar    POST /v1/hpo
a     POST /v1/hpo/{sweep}/cancel
"""

ENGINE = """
e     GET /v1/engine/deployments
e     GET /v1/engine/files/{sha256}
e     PUT /v1/engine/replicas/{replica}
e     DELETE /v1/engine/replicas/{replica}
"""
"""They serve the models of all organizations, so no administrator of one may call these routes."""

SECTIONS = (
    PROBES_AND_PAGES, DAGSTER, EXPERIMENTS, RUNS, ARTIFACTS, LOGGED_MODELS, DATASETS, JOBS, PROGRAMS, MODELS, SWEEPS, ENGINE,
)  # fmt: skip
WHO_MAY: list[tuple[str, str]] = [
    (route.strip(), letters)
    for section in SECTIONS
    for letters, _, route in (line.partition(" ") for line in section.strip().splitlines())
]
"""Routes with their letters."""
