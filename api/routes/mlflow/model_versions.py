"""/mlflow/model-versions/*: the numbered versions of a model, their stages, tags and files (row F8).

What may be a version's source, and why, is written in `resources.metadata.registry.model_version_sources` (row F11).
"""

from typing import Annotated

from fastapi import Query
from pydantic import Field, StrictBool

from api.auth.permissions import Permission
from api.dependencies import CallerOf, DatabaseOf, StoreOf
from api.responses import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import mlflow_response
from api.schemas.mlflow.registry import ACTIVE_STAGES, mlflow_stage, stages_in_mlflow_stage, version_message
from api.schemas.mlflow.requests import Message, Required, Tag
from resources.errors import invalid
from resources.metadata.filters.parser import parse_filter, parse_orders
from resources.metadata.registry.model_version_edits import ModelVersionEdits
from resources.metadata.registry.model_version_rules import is_prompt, version_number
from resources.metadata.registry.model_version_sources import PROMPT_PLACEHOLDERS, CheckedSource, check_source
from resources.metadata.registry.registered_models import RegisteredModels
from resources.metadata.registry.registry import ClientVersion, Registry, SourceDescription
from resources.metadata.registry.search import VERSION_GRAMMAR, RegistrySearch
from resources.metadata.registry.source_uris import download_uri, source_error
from resources.registration.source_description import describe_source

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
    body: CreateVersion, database: DatabaseOf, store: StoreOf, caller: CallerOf
) -> TypedResponse[responses.VersionAnswer]:
    tags = {tag.key: tag.value for tag in body.tags}
    # Before the source is looked for: who misspells the model is not to be told that its files are missing.
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
    query: Annotated[VersionName, Query()], database: DatabaseOf, caller: CallerOf
) -> TypedResponse[responses.VersionAnswer]:
    return mlflow_response(model_version=version_message(Registry(database).read(caller.model(query.name), query.number)))


@router.patch("/update", Permission.MODELS_REGISTER)
def update(body: UpdateVersion, database: DatabaseOf, caller: CallerOf) -> TypedResponse[responses.VersionAnswer]:
    changed = ModelVersionEdits(database).describe(caller.model(body.name), body.number, body.description)
    return mlflow_response(model_version=version_message(changed))


@router.post("/transition-stage", Permission.MODELS_PROMOTE)
def transition_stage(body: Transition, database: DatabaseOf, caller: CallerOf) -> TypedResponse[responses.VersionAnswer]:
    """Into Production, the version that was there is always archived: a name has one at most (row O4)."""
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
def delete(body: VersionName, database: DatabaseOf, caller: CallerOf) -> TypedResponse[responses.NothingAnswer]:
    ModelVersionEdits(database).delete(caller.model(body.name), body.number)
    return mlflow_response()


@router.get("/search", Permission.MODELS_READ)
def search(
    query: Annotated[SearchVersions, Query()], database: DatabaseOf, caller: CallerOf
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
    query: Annotated[VersionName, Query()], database: DatabaseOf, caller: CallerOf
) -> TypedResponse[responses.VersionUriAnswer]:
    with database.read() as connection:
        version = Registry(database).get(caller.model(query.name), query.number, connection)
        return mlflow_response(artifact_uri=download_uri(connection, version))


@router.post("/set-tag", Permission.MODELS_REGISTER)
def set_tag(body: VersionTag, database: DatabaseOf, caller: CallerOf) -> TypedResponse[responses.NothingAnswer]:
    ModelVersionEdits(database).set_tag(caller.model(body.name), body.number, body.key, body.value)
    return mlflow_response()


@router.delete("/delete-tag", Permission.MODELS_REGISTER)
def delete_tag(body: VersionTagKey, database: DatabaseOf, caller: CallerOf) -> TypedResponse[responses.NothingAnswer]:
    ModelVersionEdits(database).delete_tag(caller.model(body.name), body.number, body.key)
    return mlflow_response()
