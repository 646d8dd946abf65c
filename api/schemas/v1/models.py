"""Registered models, their versions and deployments as JSON."""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from recipes.storage.manifest import Artifact
from resources.metadata.database import Database
from resources.metadata.registry import deployments
from resources.metadata.registry.engine_replicas import list_live_replicas
from resources.metadata.registry.model_versions import ModelVersion as VersionRecord
from resources.serving.replicated_engine import list_states


class RegisteredModel(TypedDict):
    """`last_version` is the highest number assigned."""

    organization: str
    name: str
    creation_time: int
    last_update_time: int
    description: str
    last_version: int
    tags: dict[str, str]


class RegisteredModels(TypedDict):
    models: list[RegisteredModel]
    next_page_token: NotRequired[str]


class CreatedModel(TypedDict):
    name: str


class ModelFiles(TypedDict):
    """Files of a format: `artifact` if created here, `flavors` if logged by MLflow's client."""

    path: str
    size_bytes: int
    checksum: str | None
    artifact: NotRequired[Artifact]
    flavors: NotRequired[list[str]]


class Deployment(TypedDict):
    """`promotion` is the `seq` of the event that requested it."""

    id: int
    organization: str
    name: str
    version: int
    promotion: int
    status: Literal["deploying", "serving", "failed", "replaced", "withdrawing", "withdrawn"]
    reason: str
    url: str
    sha256: str
    created_at: int
    updated_at: int


NOT_SERVED = "not served: no file"
"""Reason for a version registered by a client without a file that the engine can load."""


class ReplicaState(TypedDict):
    """State of a deployment in one replica: `loading`, `serving` or `failed`, with a reason."""

    replica: str
    status: str
    reason: str


class ModelVersion(TypedDict):
    """`reason` is why it is quarantined or not served, or why its export failed.

    `servable`: the engine can load one of its formats.

    `artifacts` maps a format to its files. `deployment` is the newest of the version, null if it never had one.

    `replicas`: state of that deployment in each replica of an engine that pulls; absent if no replica reports it.
    """

    organization: str
    name: str
    version: int
    stage: Literal["none", "staging", "canary", "production", "archived"]
    status: Literal["pending", "ready", "failed", "quarantined"]
    reason: str
    run_id: str | None
    sole_run_id: str | None
    model_id: str | None
    run_link: str
    architecture: str | None
    base_model: str | None
    method: str | None
    artifacts: dict[str, ModelFiles]
    metrics: dict[str, float]
    training_config: dict[str, Any]
    source: str
    description: str
    created_at: int
    created_by: str
    updated_at: int
    tags: dict[str, str]
    aliases: list[str]
    servable: bool
    deployment: Deployment | None
    replicas: NotRequired[list[ReplicaState]]


class ModelVersions(TypedDict):
    versions: list[ModelVersion]
    next_page_token: NotRequired[str]


class EndedDeployments(TypedDict):
    """The deployments that the engine unloads."""

    name: str
    deployments: list[Deployment]


def version_json(version: VersionRecord, database: Database) -> ModelVersion:
    return versions_json([version], database)[0]


def versions_json(versions: Sequence[VersionRecord], database: Database) -> list[ModelVersion]:
    """Convert versions of one model to JSON, each with its newest deployment.

    The stage is the wanted state, the deployment the actual one; `servable` says whether the engine can load a file. Unknown
    values are null.
    """
    if not versions:
        return []
    with database.read() as connection:
        deployed = deployments.newest_by_version(connection, versions[0].model, [version.version for version in versions])
        replicas = list_live_replicas(connection) if deployed else []
    states = {number: list_states(replicas, deployment.id) for number, deployment in deployed.items()}
    return [
        cast(
            ModelVersion,
            vars(version)
            | {key: getattr(version, key) or None for key in ("architecture", "base_model", "method")}
            | {
                "servable": version.servable,
                "reason": version.reason or ("" if version.servable or version.status != "ready" else NOT_SERVED),
                "deployment": deployed.get(version.version),
            }
            | ({"replicas": states[version.version]} if states.get(version.version) else {}),
        )
        for version in versions
    ]
