"""Where an MLflow client downloads a version's files through this server."""

from sqlalchemy import Connection, select

from resources.errors import conflict
from resources.metadata.artifacts.artifact_locations import VERSIONS, proxied_uri
from resources.metadata.registry.model_key import ModelKey
from resources.metadata.registry.model_versions import ModelVersion, find_version
from resources.metadata.registry.source_uris import LOGGED_MODEL, is_stored
from resources.metadata.tables import logged_models
from resources.metadata.tables import model_versions as versions

MAX_DEPTH = 20
"""Versions made of versions: one names an older one each time, so a chain ends; this bounds what a read may cost."""


def download_uri(connection: Connection, version: ModelVersion) -> str:
    """The URI at which an MLflow client downloads a version's files through this server."""
    for _ in range(MAX_DEPTH):
        scheme, _, rest = version.source.partition(":/")
        if is_stored(version.source):
            return proxied_uri(f"{VERSIONS}/{version.name}/{version.version}")
        if scheme == "runs" and version.model_id and (root := files_of_model(connection, version.model_id)):
            # Which one the name in the run meant: another of that name may have been logged since.
            return "/".join([root, *rest.rstrip("/").split("/")[2:]])
        if scheme != "models":
            return version.source
        if LOGGED_MODEL.fullmatch(rest):
            return files_of_model(connection, rest) or version.source
        name, _, number = rest.rpartition("/")
        original = find_version(
            connection, ModelKey(version.organization, name).of(versions), versions.c.version == int(number)
        )
        if original is None:
            raise conflict(f"{version.reference} was made of {name} version {number}, which is gone: register it again")
        version = original
    raise conflict(f"{version.reference} is a copy of a copy, more than {MAX_DEPTH} deep: register its files again")


def files_of_model(connection: Connection, model_id: str) -> str | None:
    return connection.execute(select(logged_models.c.artifact_uri).where(logged_models.c.id == model_id)).scalar()
