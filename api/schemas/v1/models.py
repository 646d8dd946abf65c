"""Registered models, their versions and deployments as JSON (rows O1-O7)."""

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
    """`last_version` is the newest number given out."""

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
    """The files of a format: `artifact` of those that were made here, `flavors` of those that MLflow's client logged."""

    path: str
    size_bytes: int
    checksum: str | None
    artifact: NotRequired[Artifact]
    flavors: NotRequired[list[str]]


class Deployment(TypedDict):
    """`promotion` is the `seq` of the event that asked for it."""

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
"""Reason of a version that a client registered, and of which the engine can load nothing."""


class ReplicaState(TypedDict):
    """State of a deployment in one replica: `loading`, `serving` or `failed`, with a reason."""

    replica: str
    status: str
    reason: str


class ModelVersion(TypedDict):
    """`reason` is why it is quarantined or not served, or its export failed.

    `servable`: one of its formats is what the engine can load.

    `artifacts` maps a format to its files. `deployment` is the newest of the version, null where it never had one.

    `replicas`: state of that deployment in each replica of an engine that pulls; absent where no replica reports it.
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
    """What of the model the engine lets go of."""

    name: str
    deployments: list[Deployment]


def version_json(version: VersionRecord, database: Database) -> ModelVersion:
    return versions_json([version], database)[0]


def versions_json(versions: Sequence[VersionRecord], database: Database) -> list[ModelVersion]:
    """Versions of one model, each with its newest deployment: the stage says what is wanted, the deployment what is served,
    and `servable` whether there is anything that the engine can load. What is not known of one is null.
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
