"""/v1/models: versions, stages, proof (rows O1-O5, O11, S8, S9)."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from api.dependencies import CallerOf, DatabaseOf, SettingsOf, StoreOf
from resources.engine.client import HttpEngine
from resources.engine.errors import EngineError
from resources.lineage.prove import prove
from resources.metadata import deployments
from resources.metadata.database import Database
from resources.metadata.registry import ModelVersion, Registry
from resources.registration import register_run

router = APIRouter(prefix="/v1/models", tags=["v1"])


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NewModel(Body):
    name: str


class NewVersion(Body):
    """A version of a run: of a training job's run its adapter, of another run the artifact at `artifact`."""

    run_id: str
    artifact: str = "checkpoint-final"
    tags: dict[str, str] = {}


class NewStage(Body):
    stage: str
    force: bool = False


@router.get("")
def list_models(database: DatabaseOf, caller: CallerOf) -> Response:
    return JSONResponse({"models": list(Registry(database).models(caller.organization))})


@router.post("", status_code=201)
def create_model(body: NewModel, database: DatabaseOf, caller: CallerOf) -> Response:
    with database.write() as connection:
        Registry(database).ensure_model(connection, body.name, caller.organization)
    return JSONResponse({"name": body.name}, 201)


@router.get("/{name}/versions")
def list_versions(name: str, database: DatabaseOf) -> Response:
    return JSONResponse({"versions": [as_json(version, database) for version in Registry(database).versions(name)]})


@router.post("/{name}/versions", status_code=201)
def register(name: str, body: NewVersion, database: DatabaseOf, store: StoreOf, caller: CallerOf) -> Response:
    version = register_run(database, store, name, body.run_id, body.artifact, caller.user_id, body.tags)
    return JSONResponse(as_json(version, database), 201)


@router.get("/{name}/versions/{number}")
def get(name: str, number: int, database: DatabaseOf) -> Response:
    return JSONResponse(as_json(Registry(database).read(name, number), database))


@router.patch("/{name}/versions/{number}/stage")
def set_stage(name: str, number: int, body: NewStage, database: DatabaseOf, caller: CallerOf) -> Response:
    version = Registry(database).promote(
        name, number, body.stage, user=caller.user_id, force=body.force, is_admin=caller.is_admin
    )
    return JSONResponse(as_json(version, database))


@router.get("/{name}/versions/{number}/proof")
def proof(name: str, number: int, database: DatabaseOf, store: StoreOf, settings: SettingsOf) -> Response:
    """Every edge from what is served back to the raw files, hashed again now."""
    with database.read() as connection:
        version = Registry(database).get(name, number, connection)
        return JSONResponse(prove(connection, store, version, served_by(settings)).model_dump(mode="json"))


def served_by(settings: SettingsOf) -> Any:
    """Model name -> the file that the engine serves and the hash that it loaded."""

    def find(name: str) -> tuple[Path, str] | None:
        try:
            served = {model.name: model for model in HttpEngine(settings.engine_url).served()}
        except EngineError:
            return None
        model = served.get(name)
        return (Path(model.path), model.sha256) if model and model.status == "serving" else None

    return find


def as_json(version: ModelVersion, database: Database) -> dict[str, Any]:
    """The version with its newest deployment: the stage says what is wanted, the deployment what is served."""
    with database.read() as connection:
        deployed = deployments.newest(connection, version.name, version.version)
    return vars(version) | {"deployment": vars(deployed) if deployed else None}
