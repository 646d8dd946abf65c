"""/mlflow/registered-models/*: the names of models, with their tags and aliases."""

from typing import Annotated

from fastapi import Query
from pydantic import Field

from api.auth.permissions import Permission
from api.dependencies import CallerDep, DatabaseDep
from api.json_bodies import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import Message, Required, Tag, mlflow_response
from api.schemas.mlflow.registry import mlflow_stage, model_message, newest_by_stage, stages_in_mlflow_stage, version_message
from resources.errors import invalid, not_found
from resources.metadata.filters.parser import parse_filter, parse_orders
from resources.metadata.registry.model_names import LATEST_ALIAS, checked_alias, version_number
from resources.metadata.registry.registered_models import RegisteredModels
from resources.metadata.registry.search import MODEL_GRAMMAR, RegistrySearch
from resources.metadata.registry.version_lifecycle import Registry

router = Router("/mlflow/registered-models", tag="mlflow")


class ModelName(Message):
    name: Required


class CreateModel(ModelName):
    description: str = ""
    tags: tuple[Tag, ...] = ()


class RenameModel(ModelName):
    new_name: Required


class UpdateModel(ModelName):
    description: str = ""


class SearchModels(Message):
    filter: str = ""
    max_results: int = Field(100, ge=1, le=1000)
    order_by: tuple[str, ...] = ()
    page_token: str = ""


class LatestVersions(ModelName):
    stages: tuple[str, ...] = ()


class ModelTag(ModelName):
    key: Required
    value: str = ""


class ModelTagKey(ModelName):
    key: Required


class AliasName(ModelName):
    alias: Required


class Alias(AliasName):
    version: Required


@router.post("/create", Permission.MODELS_REGISTER, creates_model=True)
def create(body: CreateModel, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.RegisteredModelAnswer]:
    tags = {tag.key: tag.value for tag in body.tags}
    made = RegisteredModels(database).create(caller.model(body.name), description=body.description, tags=tags)
    return mlflow_response(registered_model=model_message(made))


@router.get("/get", Permission.MODELS_READ, allows_jobs=True)
def get(name: str, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.RegisteredModelAnswer]:
    return mlflow_response(registered_model=model_message(RegisteredModels(database).get(caller.model(name))))


@router.patch("/update", Permission.MODELS_REGISTER)
def update(body: UpdateModel, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.RegisteredModelAnswer]:
    changed = RegisteredModels(database).describe(caller.model(body.name), body.description)
    return mlflow_response(registered_model=model_message(changed))


@router.post("/rename", Permission.MODELS_ARCHIVE)
def rename(body: RenameModel, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.RegisteredModelAnswer]:
    changed = RegisteredModels(database).rename(caller.model(body.name), body.new_name)
    return mlflow_response(registered_model=model_message(changed))


@router.delete("/delete", Permission.MODELS_ARCHIVE)
def delete(body: ModelName, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.NothingAnswer]:
    RegisteredModels(database).delete(caller.model(body.name))
    return mlflow_response()


@router.get("/search", Permission.MODELS_READ)
def search(
    query: Annotated[SearchModels, Query()], database: DatabaseDep, caller: CallerDep
) -> TypedResponse[responses.RegisteredModelsAnswer]:
    page = RegistrySearch(database, caller.organization).models(
        parse_filter(query.filter, MODEL_GRAMMAR),
        parse_orders(query.order_by, MODEL_GRAMMAR),
        query.max_results,
        query.page_token or None,
    )
    found = [model_message(model) for model in page.models]
    return mlflow_response(registered_models=found or None, next_page_token=page.next_page_token)


@router.post("/get-latest-versions", Permission.MODELS_READ, read_only=True)
def latest_versions(
    body: LatestVersions, database: DatabaseDep, caller: CallerDep
) -> TypedResponse[responses.LatestVersionsAnswer]:
    """Return the newest version of each requested stage, by default of every stage."""
    model = RegisteredModels(database).get(caller.model(body.name))
    wanted = {ours for stage in body.stages for ours in stages_in_mlflow_stage(mlflow_stage(stage))}
    found = [version for version in newest_by_stage(model.latest) if not wanted or version.stage in wanted]
    return mlflow_response(model_versions=[version_message(version) for version in found] or None)


@router.get("/get-latest-versions", Permission.MODELS_READ)
def latest_versions_by_query(
    query: Annotated[LatestVersions, Query()], database: DatabaseDep, caller: CallerDep
) -> TypedResponse[responses.LatestVersionsAnswer]:
    return latest_versions(query, database, caller)


@router.post("/set-tag", Permission.MODELS_REGISTER)
def set_tag(body: ModelTag, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.NothingAnswer]:
    RegisteredModels(database).set_tag(caller.model(body.name), body.key, body.value)
    return mlflow_response()


@router.delete("/delete-tag", Permission.MODELS_REGISTER)
def delete_tag(body: ModelTagKey, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.NothingAnswer]:
    RegisteredModels(database).delete_tag(caller.model(body.name), body.key)
    return mlflow_response()


@router.post("/alias", Permission.MODELS_PROMOTE)
def set_alias(body: Alias, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.NothingAnswer]:
    RegisteredModels(database).set_alias(caller.model(body.name), body.alias, version_number(body.version))
    return mlflow_response()


@router.delete("/alias", Permission.MODELS_PROMOTE)
def delete_alias(body: AliasName, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.NothingAnswer]:
    RegisteredModels(database).delete_alias(caller.model(body.name), body.alias)
    return mlflow_response()


@router.get("/alias", Permission.MODELS_READ, allows_jobs=True)
def get_by_alias(name: str, alias: str, database: DatabaseDep, caller: CallerDep) -> TypedResponse[responses.VersionAnswer]:
    """Return the version of an alias; `latest` is the newest.

    An unknown alias gives a 400, as in MLflow.
    """
    checked_alias(alias)
    model = RegisteredModels(database).get(caller.model(name))
    if alias.lower() == LATEST_ALIAS:
        newest = max((version.version for version in model.latest), default=None)
        if newest is None:
            raise not_found(f"Latest version not found for model {name}.")
        return mlflow_response(model_version=version_message(Registry(database).read(caller.model(name), newest)))
    if alias not in model.aliases:
        raise invalid(f"Registered model alias {alias} not found.")
    return mlflow_response(model_version=version_message(Registry(database).read(caller.model(name), model.aliases[alias])))
