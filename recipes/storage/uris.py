"""Logical URIs of the object store: the only module that builds them.

They are stored in manifests and in the database, so their format never changes. `recipes.storage.locations.resolve_uri`
maps a URI to the bucket and key of an installation.
"""

from typing import Literal
from urllib.parse import quote, unquote

PRODUCT_BUCKET = "hanzo-ml"
MODELS_BUCKET = "hanzo-models"
BUCKETS = (PRODUCT_BUCKET, MODELS_BUCKET)

PRODUCT = f"s3://{PRODUCT_BUCKET}"
MODELS = f"s3://{MODELS_BUCKET}"
DATASETS = f"{PRODUCT}/datasets"
CHECKPOINTS = f"{PRODUCT}/checkpoints"
RUNS = f"{PRODUCT}/runs"
ARTIFACTS = f"{PRODUCT}/artifacts"
JOBS = f"{PRODUCT}/jobs"

CheckpointTemplate = Literal["s3://hanzo-ml/checkpoints/{run_id}/"]
"""The only value that a recipe may set for `checkpoint.storage`."""


def run_folder(run_id: str) -> str:
    return f"{RUNS}/{run_id}"


def run_record(run_id: str) -> str:
    return f"{RUNS}/{run_id}/record"


def run_result(run_id: str, program: str) -> str:
    """Return the result document of a program that worked on a run, such as `train`."""
    return f"{RUNS}/{run_id}/{program}.json"


def program_folder(job_id: str, program: str) -> str:
    """Return the folder of a program's logs and exit documents on a cluster."""
    return f"{JOBS}/{quote(job_id, safe='')}/{program}"


def attempt_folder(job_id: str, program: str, attempt: int) -> str:
    """Return the folder of one attempt; numbers are padded, so that names sort numerically."""
    return f"{program_folder(job_id, program)}/{attempt:06d}"


def node_log(job_id: str, program: str, attempt: int, node_rank: int) -> str:
    """Return the folder of a node's log in an attempt: immutable segments, ordered by name."""
    return f"{attempt_folder(job_id, program, attempt)}/logs/node-{node_rank}"


def run_artifacts(run_id: str, *path: str) -> str:
    """Return the location of what was logged to a run or to a logged model."""
    return "/".join((f"{RUNS}/{run_id}/artifacts", *path))


def run_code(run_id: str, digest: str) -> str:
    """Return the folder of a command job's sources, by content: a resubmission cannot overwrite them."""
    return f"{RUNS}/{run_id}/code/{digest[:12]}"


def run_evaluation(run_id: str) -> str:
    return f"{RUNS}/{run_id}/evaluation"


def final_checkpoint(run_id: str, role: str) -> str:
    return f"{RUNS}/{run_id}/checkpoint-final/{role}"


def parse_run_id(uri: str) -> str | None:
    """Return the run or logged model whose folder contains `uri`; None for others, also checkpoints."""
    return uri.removeprefix(f"{RUNS}/").partition("/")[0] if uri.startswith(f"{RUNS}/") else None


def run_checkpoints(run_id: str) -> str:
    return f"{CHECKPOINTS}/{run_id}"


def dataset_folder(name: str, organization: str | None) -> str:
    """Return the folder of a dataset's versions.

    `organization` is None for the default one, at the root.
    """
    return "/".join((DATASETS, *organization_folder(organization), name))


def model_folder(name: str, organization: str | None) -> str:
    """Return the folder of a model's exports.

    `organization` is None for the default one, at the root.
    """
    if organization is None and name.startswith("@"):
        name = f"%40{name[1:]}"  # a leading '@' marks an organization's folder
    return "/".join((MODELS, *organization_folder(organization), name))


def base_model(sha256: str) -> str:
    return f"{MODELS}/base/{sha256}"


def organization_artifacts(organization: str) -> str:
    """Return the folder of an organization's files in the artifact proxy.

    The default one has a folder too.
    """
    return "/".join((ARTIFACTS, *organization_folder(organization)))


def organization_folder(organization: str | None) -> tuple[str, ...]:
    """Return the path component that separates an organization's names; empty if it needs none."""
    return () if organization is None else (f"@{quote(organization, safe='')}",)


def parse_organization(folder: str) -> str | None:
    """Return the organization of a folder, or None if it is no organization's folder."""
    return unquote(folder[1:]) if folder.startswith("@") else None
