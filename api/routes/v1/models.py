"""/v1/models: versions, stages, proof, training data (rows B8, O1-O7, O11, S8, S9).

Two of the routes have a second name below /api/v1, and the stage takes PATCH and PUT (row Z7).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from api.auth.permissions import Caller
from api.dependencies import CallerOf, DatabaseOf, SettingsOf, StoreOf
from api.strict_json import StrictRoute
from resources.engine.client import HttpEngine
from resources.engine.errors import EngineError
from resources.lineage.prove import prove
from resources.lineage.training_data import training_data
from resources.metadata.database import Database
from resources.metadata.registry import deployments
from resources.metadata.registry.model_version_rules import version_number
from resources.metadata.registry.model_version_sources import check_source
from resources.metadata.registry.registry import ModelVersion, Pointer, Registry
from resources.metadata.registry.registry_pages import MAX_PAGE, models_page, versions_page
from resources.metadata.registry.source_uris import named_in
from resources.metadata.registry.undeployment import undeploy
from resources.pointed_files import pointed_at
from resources.registration import register_run

router = APIRouter(prefix="/v1/models", tags=["v1"], route_class=StrictRoute)
aliases = APIRouter(prefix="/api/v1/models", tags=["v1"], route_class=StrictRoute, include_in_schema=False)

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NewModel(Body):
    name: str


class NewVersion(Body):
    """A version of a run: of a training job's run what it trained, of another run the artifact at `artifact`."""

    run_id: str
    artifact: str = "checkpoint-final"
    tags: dict[str, str] = {}


class NewStage(Body):
    """`traffic_percent` is the share of the traffic that a canary is meant to get."""

    stage: str
    force: bool = False
    traffic_percent: int | None = None


class NewPointer(Body):
    """A version of files that lie somewhere already. `version` is a number of the caller's own, such as "3.1"."""

    name: str
    artifact_uri: str
    version: str = Field("", max_length=50)
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    stage: str = "none"
    tags: dict[str, str] = {}


@router.get("")
def list_models(database: DatabaseOf, caller: CallerOf, limit: Limit = MAX_PAGE, page_token: str | None = None) -> Response:
    """The caller's organization's models, by name."""
    found, token = models_page(database, caller.organization, limit=limit, page_token=page_token)
    following = {"next_page_token": token} if token else {}
    return JSONResponse({"models": found, **following})


@router.post("", status_code=201)
def create_model(body: NewModel, database: DatabaseOf, caller: CallerOf) -> Response:
    with database.write() as connection:
        Registry(database).ensure_model(connection, caller.model(body.name))
    return JSONResponse({"name": body.name}, 201)


@router.post("/register", status_code=201)
@aliases.post("/register", status_code=201)
def register_pointer(body: NewPointer, database: DatabaseOf, store: StoreOf, caller: CallerOf) -> Response:
    """Row O6: the model is made when it is missing; the files must be there."""
    named = named_in(body.artifact_uri)
    with database.read() as connection:
        sourced = check_source(connection, store, body.artifact_uri, caller.organization, as_mlflow=False, **named)
    told = vars(pointed_at(database, store, sourced, caller.organization))
    measured = body.metrics or told["metrics"]
    pointer = Pointer(
        **vars(sourced), **told | {"metrics": measured}, created_by=caller.user_id, label=body.version, tags=body.tags
    )
    registry, model = Registry(database), caller.model(body.name)
    with database.write() as connection:
        registry.ensure_model(connection, model)
        made = registry.create(model, pointer, connection=connection)
        made = registry.promote(model, made.version, body.stage, user=caller.user_id, connection=connection)
    return JSONResponse(as_json(made, database), 201)


@router.get("/{name}/versions")
def list_versions(
    name: str, database: DatabaseOf, caller: CallerOf, limit: Limit = MAX_PAGE, page_token: str | None = None
) -> Response:
    """The versions of a model, newest first."""
    found, token = versions_page(database, caller.model(name), limit=limit, page_token=page_token)
    following = {"next_page_token": token} if token else {}
    return JSONResponse({"versions": all_as_json(found, database), **following})


@router.post("/{name}/versions", status_code=201)
def register(name: str, body: NewVersion, database: DatabaseOf, store: StoreOf, caller: CallerOf) -> Response:
    version = register_run(database, store, name, body.run_id, body.artifact, caller.user_id, body.tags)
    return JSONResponse(as_json(version, database), 201)


@router.get("/{name}/versions/{version}")
def get(name: str, version: str, database: DatabaseOf, caller: CallerOf) -> Response:
    return JSONResponse(as_json(named_version(database, name, version, caller), database))


@router.patch("/{name}/versions/{version}/stage")
@router.put("/{name}/versions/{version}/stage")
@aliases.put("/{name}/versions/{version}/stage")
def set_stage(name: str, version: str, body: NewStage, database: DatabaseOf, caller: CallerOf) -> Response:
    moved = Registry(database).promote(
        caller.model(name),
        number_of(database, name, version, caller),
        body.stage,
        user=caller.user_id,
        force=body.force,
        is_admin=caller.is_admin,
        traffic_percent=body.traffic_percent,
    )
    return JSONResponse(as_json(moved, database))


@router.delete("/{name}/deployment", status_code=202)
def end_serving(name: str, database: DatabaseOf, caller: CallerOf) -> Response:
    """Take a model out of service: its version in production is archived, and the engine lets go of it soon after."""
    found = undeploy(database, caller.model(name), user=caller.user_id)
    return JSONResponse({"name": name, "deployments": [vars(deployment) for deployment in found]}, 202)


@router.get("/{name}/versions/{version}/proof")
def proof(name: str, version: str, database: DatabaseOf, store: StoreOf, settings: SettingsOf, caller: CallerOf) -> Response:
    """Every edge from what is served back to the raw files, hashed again now."""
    found = named_version(database, name, version, caller)
    with database.read() as connection:
        return JSONResponse(prove(connection, store, found, served_by(settings)).model_dump(mode="json"))


@router.get("/{name}/versions/{version}/data")
def data(name: str, version: str, database: DatabaseOf, store: StoreOf, caller: CallerOf) -> Response:
    """What data a version was trained on, and what is known of personal data in it."""
    found = named_version(database, name, version, caller)
    return JSONResponse(training_data(database, store, found, caller.organization).model_dump(mode="json"))


def number_of(database: Database, name: str, version: str, caller: Caller) -> int:
    """A version's number, also by the one that its registrar gave it."""
    if not version.isdecimal():
        with database.read() as connection:
            labelled = Registry(database).labelled(caller.model(name), version, connection)
        if labelled is not None:
            return labelled.version
    return version_number(version)


def named_version(database: Database, name: str, version: str, caller: Caller) -> ModelVersion:
    return Registry(database).read(caller.model(name), number_of(database, name, version, caller))


def served_by(settings: SettingsOf) -> Any:
    """Name in the engine -> the file that it serves and the hash that it loaded."""

    def find(name: str) -> tuple[Path, str] | None:
        try:
            served = {model.name: model for model in HttpEngine(settings.engine_url).served()}
        except EngineError:
            return None
        model = served.get(name)
        return (Path(model.path), model.sha256) if model and model.status == "serving" else None

    return find


def as_json(version: ModelVersion, database: Database) -> dict[str, Any]:
    return all_as_json([version], database)[0]


def all_as_json(versions: Sequence[ModelVersion], database: Database) -> list[dict[str, Any]]:
    """Versions of one model, each with its newest deployment: the stage says what is wanted, the deployment what is served,
    and `servable` whether there is anything that the engine can load. What is not known of one is null.
    """
    if not versions:
        return []
    with database.read() as connection:
        deployed = deployments.newest_of(connection, versions[0].model, [version.version for version in versions])
    return [
        vars(version)
        | {key: getattr(version, key) or None for key in ("architecture", "base_model", "method")}
        | {
            "servable": version.servable,
            "deployment": vars(deployed[version.version]) if version.version in deployed else None,
        }
        for version in versions
    ]
