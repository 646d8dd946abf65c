"""/mlflow/model-versions: versions, their stages and tags, and downloads of their files."""

import re
from typing import Annotated

from fastapi import Query, Request, Response
from pydantic import Field, StrictBool
from starlette.convertors import StringConvertor, register_url_convertor

from api.artifacts.file_response import file_response
from api.artifacts.run_artifacts import Entry, checked_path, entries_below, no_artifact
from api.auth.permissions import Permission
from api.dependencies import CallerDep, DatabaseDep, StoreDep, VerifiedFilesDep
from api.json_bodies import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import Message, Required, Tag, mlflow_response
from api.schemas.mlflow.registry import ACTIVE_STAGES, mlflow_stage, stages_in_mlflow_stage, version_message
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.errors import invalid, not_found
from resources.metadata.database import Database
from resources.metadata.filters.parser import parse_filter, parse_orders
from resources.metadata.registry.model_names import ModelKey, is_prompt, version_number
from resources.metadata.registry.model_version_edits import ModelVersionEdits
from resources.metadata.registry.model_version_sources import PROMPT_PLACEHOLDERS, CheckedSource, check_source
from resources.metadata.registry.model_versions import ModelVersion
from resources.metadata.registry.registered_models import RegisteredModels
from resources.metadata.registry.search import VERSION_GRAMMAR, RegistrySearch
from resources.metadata.registry.source_uris import download_uri, is_own_store_uri, source_error
from resources.metadata.registry.version_lifecycle import ClientVersion, Registry, SourceDescription
from resources.registration.source_description import describe_source

# Files of versions in the object store: `mlflow-artifacts:/models/NAME/VERSION/...` of the artifact proxy.
#
# MLflow clients can thus download models trained by the asset graph, whose source is a logical URI that only this server
# can resolve. Read-only: a version's files never change. The listing shares its route with that of runs (`artifacts`).

file_router = Router("/mlflow-artifacts/artifacts", tag="mlflow")

NUMBER_PATTERN = "[0-9]{1,19}"
"""Only numbers: `models/MODEL/artifacts` are files of a logged model, for an experiment at the root of the proxy."""
VERSION_PATH = re.compile(rf"models/[^/]+/{NUMBER_PATTERN}(?:/.*)?", re.DOTALL)

register_url_convertor("version", type("Version", (StringConvertor,), {"regex": NUMBER_PATTERN})())


@file_router.get(
    "/models/{name}/{number:version}/{path:path}",
    Permission.MODELS_READ,
    allows_jobs=True,
    produces="*/*",
    ranges=True,
    head=True,
)
def download(
    name: str,
    number: str,
    path: str,
    request: Request,
    database: DatabaseDep,
    files: VerifiedFilesDep,
    caller: CallerDep,
) -> Response:
    version = stored_version(database, caller.model(name), number)
    uri = f"{version.source.rstrip('/')}/{checked_path(path)}"
    try:
        return file_response(files.open(uri, version.name, artifact_at(version, uri)), path.rpartition("/")[2], request)
    except FileNotFoundError:
        raise no_artifact(path) from None


def is_version_path(proxied: str) -> bool:
    return VERSION_PATH.fullmatch(proxied) is not None


def version_entries(database: Database, store: Store, proxied: str, organization: str) -> list[Entry]:
    """List the entries directly below `models/NAME/VERSION[/FOLDER]`."""
    _, name, number, *below = checked_path(proxied).split("/", 3)
    version = stored_version(database, ModelKey(organization, name), number)
    return entries_below(store, "/".join([version.source.rstrip("/"), *below]), "")


def stored_version(database: Database, model: ModelKey, number: str) -> ModelVersion:
    version = Registry(database).read(model, version_number(number))
    if not is_own_store_uri(version.source):
        raise not_found(f"{version.reference} has no files here: ask get-download-uri where they are")
    return version


def artifact_at(version: ModelVersion, uri: str) -> Artifact | None:
    """Return the recorded artifact that contains a file; the record has its manifest's hash."""
    return next((artifact for artifact in version.own_artifacts.values() if uri.startswith(f"{artifact.uri}/")), None)


# /mlflow/model-versions/*: the numbered versions of a model, their stages, tags and files.
#
# `resources.metadata.registry.model_version_sources` defines and explains which sources are allowed.

router = Router("/mlflow/model-versions", tag="mlflow")


class CreateVersion(Message):
    name: Required
    source: Required
    run_id: str = ""
    model_id: str = ""
    run_link: str = ""
    description: str = ""
    tags: tuple[Tag, ...] = ()


class VersionName(Message):
    name: Required
    version: Required

    @property
    def number(self) -> int:
        return version_number(self.version)


class UpdateVersion(VersionName):
    description: str = ""


class Transition(VersionName):
    stage: Required
    archive_existing_versions: StrictBool = False


class SearchVersions(Message):
    filter: str = ""
    max_results: int = Field(200_000, ge=1, le=200_000)
    order_by: tuple[str, ...] = ()
    page_token: str = ""


class VersionTag(VersionName):
    key: Required
    value: str = ""


class VersionTagKey(VersionName):
    key: Required


@router.post("/create", Permission.MODELS_REGISTER)
def create(
    body: CreateVersion, database: DatabaseDep, store: StoreDep, caller: CallerDep
) -> TypedResponse[responses.VersionAnswer]:
    tags = {tag.key: tag.value for tag in body.tags}
    # Before the source is checked: a misspelled model name must not be reported as missing files.
    RegisteredModels(database).get(caller.model(body.name))
    if is_prompt(tags):
        if body.source not in PROMPT_PLACEHOLDERS:
            raise source_error(body.source, "Invalid prompt source: a prompt has no files, its text is a tag.")
        sourced, pointed = CheckedSource(body.source, body.run_id or None, None), SourceDescription()
    else:
        with database.read() as connection:
            sourced = check_source(
                connection, store, body.source, caller.organization, run_id=body.run_id, model_id=body.model_id
            )
        pointed = describe_source(database, store, sourced, caller.organization)
    pointer = ClientVersion(
        **vars(sourced),
        **vars(pointed),
        created_by=caller.user_id,
        run_link=body.run_link,
        description=body.description,
        tags=tags,
    )
    return mlflow_response(model_version=version_message(Registry(database).create(caller.model(body.name), pointer)))


@router.get("/get", Permission.MODELS_READ, allows_jobs=True)
def get(
    query: Annotated[VersionName, Query()], database: DatabaseDep, caller: CallerDep
) -> TypedResponse[responses.VersionAnswer]:
    return mlflow_response(model_version=version_message(Registry(database).read(caller.model(query.name), query.number)))


@router.patch("/update", Permission.MODELS_REGISTER)
def update(body: UpdateVersion, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.VersionAnswer]:
    changed = ModelVersionEdits(database).describe(caller.model(body.name), body.number, body.description)
    return mlflow_response(model_version=version_message(changed))


@router.post("/transition-stage", Permission.MODELS_PROMOTE)
def transition_stage(body: Transition, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.VersionAnswer]:
    """Change the stage; promoting to Production always archives the previous version there."""
    stage = mlflow_stage(body.stage)
    if body.archive_existing_versions and stage not in ACTIVE_STAGES:
        raise invalid(
            "Model version transition cannot archive existing model versions because "
            f"'{stage}' is not an Active stage. Valid stages are {', '.join(ACTIVE_STAGES)}"
        )
    moved = Registry(database).promote(
        caller.model(body.name),
        body.number,
        stage.lower(),
        user=caller.user_id,
        archive=stages_in_mlflow_stage(stage) if body.archive_existing_versions else (),
    )
    return mlflow_response(model_version=version_message(moved))


@router.delete("/delete", Permission.MODELS_ARCHIVE)
def delete(body: VersionName, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.NothingAnswer]:
    ModelVersionEdits(database).delete(caller.model(body.name), body.number)
    return mlflow_response()


@router.get("/search", Permission.MODELS_READ)
def search(
    query: Annotated[SearchVersions, Query()], database: DatabaseDep, caller: CallerDep
) -> TypedResponse[responses.VersionsAnswer]:
    page = RegistrySearch(database, caller.organization).versions(
        parse_filter(query.filter, VERSION_GRAMMAR),
        parse_orders(query.order_by, VERSION_GRAMMAR),
        query.max_results,
        query.page_token or None,
    )
    found = [version_message(version) for version in page.versions]
    return mlflow_response(model_versions=found or None, next_page_token=page.next_page_token)


@router.get("/get-download-uri", Permission.MODELS_READ, allows_jobs=True)
def get_download_uri(
    query: Annotated[VersionName, Query()], database: DatabaseDep, caller: CallerDep
) -> TypedResponse[responses.VersionUriAnswer]:
    with database.read() as connection:
        version = Registry(database).get(caller.model(query.name), query.number, connection)
        return mlflow_response(artifact_uri=download_uri(connection, version))


@router.post("/set-tag", Permission.MODELS_REGISTER)
def set_tag(body: VersionTag, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.NothingAnswer]:
    ModelVersionEdits(database).set_tag(caller.model(body.name), body.number, body.key, body.value)
    return mlflow_response()


@router.delete("/delete-tag", Permission.MODELS_REGISTER)
def delete_tag(body: VersionTagKey, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.NothingAnswer]:
    ModelVersionEdits(database).delete_tag(caller.model(body.name), body.number, body.key)
    return mlflow_response()
