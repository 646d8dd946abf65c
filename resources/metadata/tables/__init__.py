"""All tables of the metadata database.

Times are integers, milliseconds since 1970 UTC, as in MLflow's API.
"""

from resources.metadata.tables.base import SEQUENCE, schema
from resources.metadata.tables.cluster import cluster_jobs, gpu_usage, job_attempts, program_tokens
from resources.metadata.tables.datasets import (
    artifact_files,
    artifacts,
    chunk_claims,
    dataset_holders,
    dataset_problems,
    dataset_validations,
    dataset_versions,
    datasets,
    lineage_edges,
)
from resources.metadata.tables.engine import deployment_files, engine_replicas
from resources.metadata.tables.jobs import (
    call_tallies,
    event_positions,
    events,
    heartbeats,
    job_tokens,
    jobs,
    sweep_trials,
    sweeps,
)
from resources.metadata.tables.logged_models import (
    inputs,
    logged_model_metrics,
    logged_model_params,
    logged_model_tags,
    logged_models,
    run_inputs,
    run_models,
)
from resources.metadata.tables.registry import (
    deployments,
    model_aliases,
    model_version_tags,
    model_versions,
    registered_model_tags,
    registered_models,
)
from resources.metadata.tables.tracking import experiment_tags, experiments, latest_metrics, metrics, params, run_tags, runs

__all__ = [
    "SEQUENCE",
    "artifact_files",
    "artifacts",
    "call_tallies",
    "chunk_claims",
    "cluster_jobs",
    "dataset_holders",
    "dataset_problems",
    "dataset_validations",
    "dataset_versions",
    "datasets",
    "deployment_files",
    "deployments",
    "engine_replicas",
    "event_positions",
    "events",
    "experiment_tags",
    "experiments",
    "gpu_usage",
    "heartbeats",
    "inputs",
    "job_attempts",
    "job_tokens",
    "jobs",
    "latest_metrics",
    "lineage_edges",
    "logged_model_metrics",
    "logged_model_params",
    "logged_model_tags",
    "logged_models",
    "metrics",
    "model_aliases",
    "model_version_tags",
    "model_versions",
    "params",
    "program_tokens",
    "registered_model_tags",
    "registered_models",
    "run_inputs",
    "run_models",
    "run_tags",
    "runs",
    "schema",
    "sweep_trials",
    "sweeps",
]
