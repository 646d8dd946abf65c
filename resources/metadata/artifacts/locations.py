"""Artifact URIs of experiments, runs and logged models, and their owners."""

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote, urlparse, urlsplit, urlunsplit

from sqlalchemy import Connection, literal, select

from recipes.storage import uris
from resources.errors import HanzoError, invalid
from resources.metadata.field_rules import checked_text, printable
from resources.metadata.tables import experiments, logged_models, runs

# Locations of the files of experiments, runs and logged models, as URIs that MLflow's clients read.
#
# By default they are served by this server's artifact proxy, at `mlflow-artifacts:/EXPERIMENT/...`. A client may choose
# another location when it creates an experiment (`artifact_location`):
#
# - `mlflow-artifacts:/PATH` is served by the proxy too, under a name that the client chose;
# - any other URI is stored and returned, as in MLflow: the *client* reads and writes there, with its own permissions. This
#   server never opens such a location, so it cannot be made to read a file or call a host (MLflow's past SSRF and path
#   traversal vulnerabilities).

PROXY_SCHEME = "mlflow-artifacts"
MODELS_PART = "models"
"""First part of the proxied path of a registered model's files."""
MAX_LOCATION_LENGTH = 2048
REFUSED_SCHEMES = ("http", "https", "ftp", "sftp", "hdfs", "viewfs", "r2", "b2", "abfss")
"""Schemes that MLflow 3.17 refuses too: a reader of such a location could be made to call that host."""
REFERENCE_SCHEMES = ("runs", "models")
"""Schemes of references to entities of a tracking server, which are not locations."""
EXPERIMENT_ID_PATTERN = re.compile(r"\d+")
"""Numeric paths belong to experiments."""
UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\#?]")


def default_location(experiment_id: int) -> str:
    return proxied_uri(str(experiment_id))


def run_files_uri(location: str, run_id: str) -> str:
    """Return the location of a run's files, for an experiment at `location`."""
    return join_uri(location, f"{run_id}/artifacts")


def model_files_uri(location: str, model_id: str) -> str:
    return join_uri(location, f"{MODELS_PART}/{model_id}/artifacts")


def join_uri(location: str, path: str) -> str:
    """Append a path to a location, before its query if it has one."""
    if is_proxied(location):
        root = proxied_path(location)
        return proxied_uri(f"{root}/{path}" if root else path)
    scheme, host, root, query, _ = urlsplit(location)
    if not scheme:
        return f"{location.rstrip('/')}/{path}"
    return urlunsplit((scheme, host, f"{root.rstrip('/')}/{path}", query, ""))


def is_proxied(uri: str) -> bool:
    """Return whether the files at a URI are in this server's store."""
    return uri.partition(":")[0] == PROXY_SCHEME


def proxied_uri(path: str) -> str:
    """Return the URI of an artifact proxy path; the inverse of `proxied_path`."""
    return f"{PROXY_SCHEME}:/{path}"


def proxied_path(uri: str) -> str:
    """Return the artifact proxy path of an `mlflow-artifacts:` URI."""
    return uri.partition(":")[2].strip("/")


def check_proxied(uri: str) -> None:
    """Raise a 400 if only clients can read the files' location."""
    if not is_proxied(uri):
        raise invalid(
            f"These artifacts are at {printable(uri)}, which this server cannot read: "
            "read them with an MLflow client that has access"
        )


def absolute_location(location: str, folder: str) -> str:
    """Make a relative path or relative `file:` URI absolute; return anything else unchanged."""
    path = location.removeprefix("file:")
    if not path or ":" in path or path.startswith("/"):
        return location
    return f"{'' if path == location else 'file://'}{posixpath.join(folder, path)}"


def checked_location(location: str) -> str:
    """Return the location of an experiment's files, as chosen by the client.

    Raises:
        HanzoError: 400 if it is not a location for files, or the client may not choose it.
    """
    if len(location) > MAX_LOCATION_LENGTH:
        raise invalid(
            "Invalid artifact path length. The length of the artifact path cannot be greater than "
            f"{MAX_LOCATION_LENGTH} characters."
        )
    checked_text(location, "artifact_location")
    if not location:
        return location
    try:
        scheme, host, path, query, fragment = urlsplit(location)
        params = urlparse(location).params
    except ValueError:
        raise location_error(location, "It is not a URI") from None
    if fragment or params:
        raise invalid("'artifact_location' URL can't include fragments or params.")
    if ".." in unquote_fully(query):
        raise invalid("Invalid query string")
    if scheme in REFERENCE_SCHEMES:
        raise invalid(f"Artifact location cannot be a {scheme}:/ URI. Given: '{printable(location)}'")
    if scheme in REFUSED_SCHEMES or (scheme == PROXY_SCHEME and host):
        raise location_error(location, f"A {scheme} URI with a host names a server: use a bucket or {PROXY_SCHEME}:/PATH")
    if scheme == PROXY_SCHEME:
        return checked_proxy_path(location, path)
    if scheme == "s3" and host in uris.BUCKETS:  # clients must not write datasets, checkpoints or models
        raise location_error(location, f"It is this server's own store: leave it out, or use {PROXY_SCHEME}:/PATH")
    if scheme in ("", "file") and not host and not path.startswith("/"):
        raise location_error(location, f"A relative path is not allowed: use a URI, such as {PROXY_SCHEME}:/PATH")
    return location


def checked_proxy_path(location: str, path: str) -> str:
    parts = path.strip("/").split("/")
    if (
        UNSAFE_CHARACTERS.search(location)
        or unquote(location) != location
        or (path.strip("/") and {"", ".", ".."} & set(parts))
    ):
        raise location_error(location, "Its path must be normalized, without escapes, control characters, '\\', '#' or '?'")
    if parts[0] == MODELS_PART or EXPERIMENT_ID_PATTERN.fullmatch(parts[0]):
        raise location_error(location, "Numbers and 'models' are reserved: start the path with another name")
    return location


def unquote_fully(text: str) -> str:
    while (plain := unquote(text)) != text:
        text = plain
    return text


def location_error(location: str, why: str) -> HanzoError:
    return invalid(f"Invalid value '{printable(location)}' for parameter 'artifact_location' supplied: {why}")


ARTIFACTS_FOLDER = "artifacts"


@dataclass(frozen=True)
class FilesOwner:
    """A run or logged model, and `path` within its files (empty: all)."""

    id: str
    is_model: bool
    organization: str
    lifecycle_stage: str
    path: str


def find_files_owner(connection: Connection, proxied: str) -> FilesOwner | None:
    """Return the run or logged model that owns the files at a path, or None.

    The path is `LOCATION/RUN/artifacts[/PATH]` or `LOCATION/models/MODEL/artifacts[/PATH]`.

    Args:
        proxied: a path without empty parts.
    """
    wanted = {(identifier, uri): path for identifier, uri, path in owner_candidates(proxied)}
    if not wanted:
        return None
    ids = {identifier for identifier, _ in wanted}
    run_query = select(
        runs.c.id, runs.c.artifact_uri, runs.c.organization, runs.c.lifecycle_stage, literal(False).label("is_model")
    ).where(runs.c.id.in_(ids))
    model_query = (
        select(
            logged_models.c.id,
            logged_models.c.artifact_uri,
            experiments.c.organization,
            logged_models.c.lifecycle_stage,
            literal(True).label("is_model"),
        )
        .join(experiments, experiments.c.id == logged_models.c.experiment_id)
        .where(logged_models.c.id.in_(ids))
    )
    for row in connection.execute(run_query.union_all(model_query)):
        path = wanted.get((row.id, row.artifact_uri))
        if path is not None:
            return FilesOwner(row.id, bool(row.is_model), row.organization, row.lifecycle_stage, path)
    return None


def owner_candidates(proxied: str) -> Iterator[tuple[str, str, str]]:
    """Yield each possible owner of a path, its files' URI, and the path within them."""
    parts = proxied.split("/")
    for end in range(1, len(parts)):
        if parts[end] == ARTIFACTS_FOLDER and parts[end - 1] != MODELS_PART:
            yield parts[end - 1], proxied_uri("/".join(parts[: end + 1])), "/".join(parts[end + 1 :])


def list_parent_folders(connection: Connection, proxied: str, organization: str) -> list[str] | None:
    """List a virtual folder above an organization's artifacts; None if it is not one.

    As in MLflow, these are `artifacts` of a run or model, the runs and `models` of an experiment, and the models in
    `models`. They are read from the database, not the store, so a run without files is listed too. Holds all names in
    memory.
    """
    owner = find_files_owner(connection, f"{proxied}/{ARTIFACTS_FOLDER}")
    if owner is not None and not owner.path and owner.organization == organization:
        return [ARTIFACTS_FOLDER]
    place, _, last = proxied.rpartition("/")
    if last == MODELS_PART and (found := find_experiments_at(connection, place, organization)):
        return list(connection.scalars(select(logged_models.c.id).where(logged_models.c.experiment_id.in_(found))))
    if not (found := find_experiments_at(connection, proxied, organization)):
        return None
    any_model = select(logged_models.c.id).where(logged_models.c.experiment_id.in_(found)).limit(1)
    model_query = [MODELS_PART] if connection.scalar(any_model) else []
    return [*connection.scalars(select(runs.c.id).where(runs.c.experiment_id.in_(found))), *model_query]


def find_experiments_at(connection: Connection, proxied: str, organization: str) -> list[int]:
    """Return the experiments located at a path: several may share a location that clients chose."""
    uri = proxied_uri(proxied)
    at_place = experiments.c.artifact_location.in_([uri, f"{uri}/"]) & (experiments.c.organization == organization)
    return list(connection.scalars(select(experiments.c.id).where(at_place)))
