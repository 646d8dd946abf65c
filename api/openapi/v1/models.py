"""Registered models, their versions and what is served of them (rows O1-O7)."""

from typing import Any, Literal

import msgspec

from api.openapi.v1.artifacts import Artifact
from api.schemas.mlflow.responses import Message


class RegisteredModel(Message):
    """`last_version` is the newest number given out."""

    organization: str
    name: str
    creation_time: int
    last_update_time: int
    description: str
    last_version: int
    tags: dict[str, str]


class RegisteredModels(Message):
    models: list[RegisteredModel]
    next_page_token: str = ""


class CreatedModel(Message):
    name: str


class ModelFiles(Message):
    """The files of a format: `artifact` of those that were made here, `flavors` of those that MLflow's client logged."""

    path: str
    size_bytes: int
    checksum: str | None
    artifact: Artifact | msgspec.UnsetType = msgspec.UNSET
    flavors: list[str] = []


class Deployment(Message):
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


class ModelVersion(Message):
    """`reason` is why it is quarantined; `servable`: one of its formats is what the engine can load.

    `artifacts` maps a format to its files. `deployment` is the newest of the version, null where it never had one.
    """

    organization: str
    name: str
    version: int
    stage: Literal["none", "staging", "canary", "production", "archived"]
    status: Literal["pending", "ready", "quarantined"]
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


class ModelVersions(Message):
    versions: list[ModelVersion]
    next_page_token: str = ""


class EndedDeployments(Message):
    """What of the model the engine lets go of."""

    name: str
    deployments: list[Deployment]
