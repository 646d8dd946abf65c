"""/v1/models: versions, stages, proof and training data of models.

Two of the routes are also served below /api/v1, and the stage accepts PATCH and PUT.
"""

from typing import Annotated, cast

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from api.auth.permissions import Caller, Permission
from api.dependencies import CallerDep, DatabaseDep, SettingsDep, StoreDep
from api.json_bodies import TypedResponse, json_response
from api.routing import Router
from api.schemas.v1.models import (
    CreatedModel,
    Deployment,
    EndedDeployments,
    ModelVersion,
    ModelVersions,
    RegisteredModel,
    RegisteredModels,
    version_json,
    versions_json,
)
from resources.lineage.proof import Proof, prove_version
from resources.lineage.training_data import TrainingData, describe_training_data
from resources.metadata.database import Database
from resources.metadata.registry.model_names import version_number
from resources.metadata.registry.model_version_sources import check_source
from resources.metadata.registry.search import MAX_PAGE, page_models, page_versions
from resources.metadata.registry.source_uris import find_named_owner
from resources.metadata.registry.undeployment import undeploy
from resources.metadata.registry.version_lifecycle import ClientVersion, Registry
from resources.metadata.registry.version_lifecycle import ModelVersion as VersionRecord
from resources.registration.run_registration import register_run
from resources.registration.source_description import describe_source
from resources.serving.replicated_engine import hash_finder

router = Router("/v1/models", tag="v1", alias_prefix="/api/v1/models")

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NewModel(Body):
    name: str


class NewVersion(Body):
    """A version of a run: what its training job trained, or the artifact at `artifact`."""

    run_id: str
    artifact: str = "checkpoint-final"
    tags: dict[str, str] = {}


class NewStage(Body):
    """`traffic_percent` is the intended share of traffic of a canary."""

    stage: str
    force: bool = False
    traffic_percent: int | None = None


class NewPointer(Body):
    """A version of files that are already stored; `version` is the caller's own number ("3.1")."""

    name: str
    artifact_uri: str
    version: str = Field("", max_length=50)
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    stage: str = "none"
    tags: dict[str, str] = {}


@router.get("", Permission.MODELS_READ)
def list_models(
    database: DatabaseDep, caller: CallerDep, limit: Limit = MAX_PAGE, page_token: str | None = None
) -> TypedResponse[RegisteredModels]:
    """List the models of the caller's organization, by name."""
    found, token = page_models(database, caller.organization, limit=limit, page_token=page_token)
    page: RegisteredModels = {"models": cast(list[RegisteredModel], found)}
    if token:
        page["next_page_token"] = token
    return json_response(page)


@router.post("", Permission.MODELS_REGISTER, creates_model=True, status_code=201)
def create_model(body: NewModel, database: DatabaseDep, caller: CallerDep) -> TypedResponse[CreatedModel]:
    with database.write() as connection:
        Registry(database).ensure_model(connection, caller.model(body.name))
    return json_response({"name": body.name}, 201)


@router.post("/register", Permission.MODELS_REGISTER, creates_model=True, status_code=201, alias=True)
def register_pointer(
    body: NewPointer, database: DatabaseDep, store: StoreDep, caller: CallerDep
) -> TypedResponse[ModelVersion]:
    """Register a version of existing files, and create the model if it is missing."""
    named = find_named_owner(body.artifact_uri)
    with database.read() as connection:
        sourced = check_source(connection, store, body.artifact_uri, caller.organization, as_mlflow=False, **named)
    pointed = vars(describe_source(database, store, sourced, caller.organization))
    measured = body.metrics or pointed["metrics"]
    pointer = ClientVersion(
        **vars(sourced), **pointed | {"metrics": measured}, created_by=caller.user_id, label=body.version, tags=body.tags
    )
    registry, model = Registry(database), caller.model(body.name)
    with database.write() as connection:
        registry.ensure_model(connection, model)
        made = registry.create(model, pointer, connection=connection)
        made = registry.promote(model, made.version, body.stage, user=caller.user_id, connection=connection)
    return json_response(version_json(made, database), 201)


@router.get("/{name}/versions", Permission.MODELS_READ, allows_jobs=True)
def list_versions(
    name: str, database: DatabaseDep, caller: CallerDep, limit: Limit = MAX_PAGE, page_token: str | None = None
) -> TypedResponse[ModelVersions]:
    """List the versions of a model, newest first."""
    found, token = page_versions(database, caller.model(name), limit=limit, page_token=page_token)
    page: ModelVersions = {"versions": versions_json(found, database)}
    if token:
        page["next_page_token"] = token
    return json_response(page)


@router.post("/{name}/versions", Permission.MODELS_REGISTER, creates_model=True, status_code=201)
def register(
    name: str, body: NewVersion, database: DatabaseDep, store: StoreDep, caller: CallerDep
) -> TypedResponse[ModelVersion]:
    version = register_run(database, store, name, body.run_id, body.artifact, caller.user_id, body.tags)
    return json_response(version_json(version, database), 201)


@router.get("/{name}/versions/{version}", Permission.MODELS_READ, allows_jobs=True)
def get(name: str, version: str, database: DatabaseDep, caller: CallerDep) -> TypedResponse[ModelVersion]:
    return json_response(version_json(find_version(database, name, version, caller), database))


@router.patch("/{name}/versions/{version}/stage", Permission.MODELS_PROMOTE)
@router.put("/{name}/versions/{version}/stage", Permission.MODELS_PROMOTE, alias=True)
def set_stage(
    name: str, version: str, body: NewStage, database: DatabaseDep, caller: CallerDep
) -> TypedResponse[ModelVersion]:
    moved = Registry(database).promote(
        caller.model(name),
        find_version_number(database, name, version, caller),
        body.stage,
        user=caller.user_id,
        force=body.force,
        is_admin=caller.is_admin,
        traffic_percent=body.traffic_percent,
    )
    return json_response(version_json(moved, database))


@router.delete("/{name}/deployment", Permission.MODELS_ARCHIVE, status_code=202)
def end_serving(name: str, database: DatabaseDep, caller: CallerDep) -> TypedResponse[EndedDeployments]:
    """Archive a model's production version; the engine unloads it soon after."""
    found = undeploy(database, caller.model(name), user=caller.user_id)
    return json_response({"name": name, "deployments": [cast(Deployment, vars(each)) for each in found]}, 202)


@router.get("/{name}/versions/{version}/proof", Permission.MODELS_READ)
def proof(
    name: str, version: str, database: DatabaseDep, store: StoreDep, settings: SettingsDep, caller: CallerDep
) -> TypedResponse[Proof]:
    """Prove the lineage of a version back to its raw files, by hashing them again."""
    found = find_version(database, name, version, caller)
    with database.read() as connection:
        return json_response(prove_version(connection, store, found, hash_finder(settings, database)))


@router.get("/{name}/versions/{version}/data", Permission.MODELS_READ)
def data(name: str, version: str, database: DatabaseDep, store: StoreDep, caller: CallerDep) -> TypedResponse[TrainingData]:
    """Return the data that a version was trained on, and known personal data in it."""
    found = find_version(database, name, version, caller)
    return json_response(describe_training_data(database, store, found, caller.organization))


def find_version_number(database: Database, name: str, version: str, caller: Caller) -> int:
    """Return a version's number; also accepts the number that its registrar chose."""
    if not version.isdecimal():
        with database.read() as connection:
            labelled = Registry(database).find_by_label(caller.model(name), version, connection)
        if labelled is not None:
            return labelled.version
    return version_number(version)


def find_version(database: Database, name: str, version: str, caller: Caller) -> VersionRecord:
    return Registry(database).read(caller.model(name), find_version_number(database, name, version, caller))
