"""Parse the source URI of a version, and resolve its download URI."""

import re
from urllib.parse import unquote_plus

from sqlalchemy import Connection, select

from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.errors import HanzoError, conflict, invalid
from resources.metadata.artifacts.locations import ARTIFACTS_FOLDER, MODELS_PART, PROXY_SCHEME, is_proxied, proxied_uri
from resources.metadata.field_rules import printable
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.model_versions import ModelVersion, find_version
from resources.metadata.tables import logged_models, runs
from resources.metadata.tables import model_versions as versions

# The syntax of a version's source; nothing is looked up here.
#
# Which sources a client may name, and whether files exist there, is checked by `model_version_sources`.

LOGGED_MODEL_PATTERN = re.compile(r"m-[\w\-]+")
FORBIDDEN_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\#?%\ufffd]")
HOST_SCHEMES = ("http", "https", "ftp", "sftp", PROXY_SCHEME)


def parse_source(source: str) -> tuple[str, list[str]]:
    """Return scheme and path of a source without a host. Raises for every refused form."""
    scheme, colon, rest = source.partition(":")
    foreign = rest.startswith("//") and scheme.lower() in HOST_SCHEMES
    if not colon or scheme.lower() == "file" or not re.fullmatch(r"[A-Za-z][\w+.\-]+", scheme):
        raise source_error(
            source,
            "To use a local path as a model version source, the run_id request parameter has to be specified and the local "
            "path has to be contained within the artifact directory of the run specified by the run_id. This server keeps "
            "no artifacts at local paths: log the model to a run and register runs:/RUN_ID/PATH",
        )
    path = rest.removeprefix("//") if scheme.lower() == "s3" else rest.removeprefix("/")
    parts = path.rstrip("/").split("/")
    if (
        FORBIDDEN_CHARACTERS.search(rest)
        or ".." in unquote_fully(source).split("/")
        or any(part in ("", ".", "..") for part in parts)
    ):
        host = f"'source' cannot use the '{scheme}' scheme: it addresses a host other than this server's artifact storage. "
        raise source_error(
            source,
            f"{host if foreign else ''}If supplying a source as an http, https, local file path, ftp, objectstore, or "
            "mlflow-artifacts uri, an absolute path must be provided without relative path references present. Please "
            "provide an absolute path.",
        )
    if scheme not in ("runs", "models", PROXY_SCHEME, "s3"):
        raise source_error(
            source, "Use runs:/RUN_ID/PATH, models:/NAME/VERSION, mlflow-artifacts:/... or a place in this server's store"
        )
    return scheme, parts


def unquote_fully(text: str) -> str:
    while (plain := unquote_plus(text)) != text:
        text = plain
    return text


def find_named_owner(source: str) -> dict[str, str]:
    """Return the owner named in a source, for requests that do not name it."""
    scheme, parts = parse_source(source)
    if scheme == "runs":
        return {"run_id": parts[0]}
    if scheme == "models" and LOGGED_MODEL_PATTERN.fullmatch("/".join(parts)):
        return {"model_id": parts[0]}
    if scheme == PROXY_SCHEME and ARTIFACTS_FOLDER in parts[1:]:
        owner = parts.index(ARTIFACTS_FOLDER, 1) - 1
        return {"model_id" if owner and parts[owner - 1] == MODELS_PART else "run_id": parts[owner]}
    if scheme == "s3" and parts[:2] == [uris.PRODUCT_BUCKET, "runs"] and len(parts) > 2:
        return {"run_id": parts[2]}
    return {}


def is_own_store_uri(uri: str) -> bool:
    """Return whether a URI is in this server's store, as the asset graph writes it."""
    return uri.startswith(tuple(f"s3://{bucket}/" for bucket in uris.BUCKETS))


def source_error(source: str, detail: str) -> HanzoError:
    return invalid(f"Invalid model version source: '{printable(source)}'. {detail}")


# The logged model that `runs:/RUN/NAME` refers to: MLflow 3 stores the files of `log_model(name=...)` outside the run.
#
# Its client searches both: the run, and the newest model of that name that the run created.


def find_logged_model(connection: Connection, store: Store, run_id: str, path: list[str]) -> str | None:
    """Find the run's model named by the path's start, with files at the rest."""
    if not path:
        return None
    query = (
        select(logged_models.c.id, logged_models.c.artifact_uri)
        .join(runs, runs.c.id == logged_models.c.source_run_id)
        .where(
            runs.c.id == run_id,
            logged_models.c.experiment_id == runs.c.experiment_id,
            logged_models.c.name == path[0],
            logged_models.c.lifecycle_stage == "active",
        )
        .order_by(logged_models.c.created_at.desc(), logged_models.c.id)
        .limit(1)
    )
    model = connection.execute(query).first()
    if model is None:
        return None
    is_elsewhere = not is_proxied(model.artifact_uri)  # only clients can read other locations
    place = uris.run_artifacts(model.id, *path[1:])
    return str(model.id) if is_elsewhere or has_files(store, place) else None


def has_files(store: Store, uri: str) -> bool:
    try:
        return store.exists(uri)
    except BrokenArtifact:
        return False


MAX_DEPTH = 20
"""Maximum length of a chain of copies. A version's source is always older, so chains end; this bounds the cost of a read."""


def download_uri(connection: Connection, version: ModelVersion) -> str:
    """Return the URI at which MLflow clients download a version's files through this server."""
    for _ in range(MAX_DEPTH):
        scheme, _, rest = version.source.partition(":/")
        if is_own_store_uri(version.source):
            return proxied_uri(f"{MODELS_PART}/{version.name}/{version.version}")
        if scheme == "runs" and version.model_id and (root := logged_model_uri(connection, version.model_id)):
            # Use the model id: another model of that name may have been logged since.
            return "/".join([root, *rest.rstrip("/").split("/")[2:]])
        if scheme != "models":
            return version.source
        if LOGGED_MODEL_PATTERN.fullmatch(rest):
            return logged_model_uri(connection, rest) or version.source
        name, _, number = rest.rpartition("/")
        original = find_version(
            connection, ModelKey(version.organization, name).row_filter(versions), versions.c.version == int(number)
        )
        if original is None:
            raise conflict(f"{version.reference} is a copy of {name} version {number}, which was deleted: register it again")
        version = original
    raise conflict(f"{version.reference} is a copy of a copy, more than {MAX_DEPTH} deep: register its files again")


def logged_model_uri(connection: Connection, model_id: str) -> str | None:
    return connection.execute(select(logged_models.c.artifact_uri).where(logged_models.c.id == model_id)).scalar()
