"""Files of versions that lie in the object store: `mlflow-artifacts:/models/NAME/VERSION/...` of the artifact proxy.

So an MLflow client downloads what the asset graph trained, whose source is a logical URI that only this server can read.
Read-only: a version's files never change. The listing shares its route with that of runs (`artifacts`).
"""

import re

from fastapi import Request, Response
from starlette.convertors import StringConvertor, register_url_convertor

from api.artifacts.file_response import file_response
from api.artifacts.run_artifacts import Entry, checked_path, entries_below, no_artifact
from api.auth.permissions import Permission
from api.dependencies import CallerOf, DatabaseOf, VerifiedFilesOf
from api.routing import Router
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.errors import not_found
from resources.metadata.database import Database
from resources.metadata.registry.model_key import ModelKey
from resources.metadata.registry.model_version_rules import version_number
from resources.metadata.registry.model_versions import ModelVersion
from resources.metadata.registry.registry import Registry
from resources.metadata.registry.source_uris import is_own_store_uri

router = Router("/mlflow-artifacts/artifacts", tag="mlflow")

NUMBER = "[0-9]{1,19}"
"""Other words are none: `models/MODEL/artifacts` are a logged model's files, of an experiment at the root of the proxy."""
VERSION_PATH = re.compile(rf"models/[^/]+/{NUMBER}(?:/.*)?", re.DOTALL)

register_url_convertor("version", type("Version", (StringConvertor,), {"regex": NUMBER})())


@router.get(
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
    database: DatabaseOf,
    files: VerifiedFilesOf,
    caller: CallerOf,
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
    """What lies directly below `models/NAME/VERSION[/FOLDER]`."""
    _, name, number, *below = checked_path(proxied).split("/", 3)
    version = stored_version(database, ModelKey(organization, name), number)
    return entries_below(store, "/".join([version.source.rstrip("/"), *below]), "")


def stored_version(database: Database, model: ModelKey, number: str) -> ModelVersion:
    version = Registry(database).read(model, version_number(number))
    if not is_own_store_uri(version.source):
        raise not_found(f"{version.reference} has no files here: ask get-download-uri where they are")
    return version


def artifact_at(version: ModelVersion, uri: str) -> Artifact | None:
    """The recorded artifact of a version that a file belongs to: its manifest is known by its hash."""
    return next((artifact for artifact in version.own_artifacts.values() if uri.startswith(f"{artifact.uri}/")), None)
