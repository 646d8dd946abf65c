"""Describe a version whose source a client names.

What its run logged, and the files at its source. A source may be inaccessible to this server; then its files are not
described. In the store, only files that describe the model are read: weights may have hundreds of GB, and are described with
the hash recorded at upload, or without one.
"""

from collections.abc import Mapping

from sqlalchemy import Connection, select

from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.metadata.artifacts.file_hashes import UNKNOWN_HASH, FileHashes
from resources.metadata.artifacts.locations import PROXY_SCHEME, find_files_owner, is_proxied
from resources.metadata.database import Database
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.model_version_sources import CheckedSource
from resources.metadata.registry.model_versions import LoggedFiles, ModelVersion, find_version
from resources.metadata.registry.source_uris import LOGGED_MODEL_PATTERN, is_own_store_uri, logged_model_uri
from resources.metadata.registry.version_lifecycle import SourceDescription
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import runs
from resources.metadata.tracking.run_search import RunSearch
from resources.metadata.tracking.runs import Runs
from resources.monitoring.usage_totals import sum_run_gpu_hours
from resources.registration.model_facts import (
    MAX_CONFIG_BYTES,
    MLFLOW_FORMAT,
    MLMODEL_FILE,
    WEIGHTS_FORMAT,
    WeightFiles,
    combined_checksum,
    find_weights,
    read_architecture,
    read_flavors,
    read_run_facts,
)

MAX_FILES = 500
"""Maximum number of files of a folder whose hashes are read: a model has ten to a hundred."""


def describe_source(database: Database, store: Store, sourced: CheckedSource, organization: str) -> SourceDescription:
    """Describe a source that was checked."""
    with database.read() as connection:
        if (original := find_original(connection, sourced, organization)) is not None:
            return copy_description(original)
        location = stored_uri(connection, sourced)
        known = select(runs.c.id).where(runs.c.id == sourced.run_id, runs.c.organization == organization)
        run_id = connection.execute(known).scalar()
        gpu_hours = sum_run_gpu_hours(connection, run_id) if run_id else None
    architecture, files = describe_files(store, FileHashes(database), location) if location else ("", {})
    if run_id is None:  # the run is another server's
        return SourceDescription(architecture=architecture, artifacts=files)
    facts = read_run_facts(RunSearch(database).get(Runs(database).get(run_id)), gpu_hours)
    return SourceDescription(architecture, facts.base_model, facts.method, files, facts.metrics, facts.training_config)


def find_original(connection: Connection, sourced: CheckedSource, organization: str) -> ModelVersion | None:
    """Return the version that a source names as `models:/NAME/NUMBER`, or None."""
    scheme, _, rest = sourced.source.partition(":/")
    if scheme != "models" or LOGGED_MODEL_PATTERN.fullmatch(rest):
        return None
    name, _, number = rest.rpartition("/")
    return find_version(connection, ModelKey(organization, name).row_filter(versions), versions.c.version == int(number))


def copy_description(version: ModelVersion) -> SourceDescription:
    """Copy a version's description, without the artifacts made here.

    Those are verified, exported and served as the original.
    """
    logged = {format: LoggedFiles(**each) for format, each in version.artifacts.items() if "artifact" not in each}
    return SourceDescription(
        version.architecture, version.base_model, version.method, logged, version.metrics, version.training_config
    )


def stored_uri(connection: Connection, sourced: CheckedSource) -> str | None:
    """Return the URI of a source in the store.

    None if it is elsewhere or unknown.
    """
    source = sourced.source.rstrip("/")
    scheme, _, rest = source.partition(":/")
    if is_own_store_uri(source):
        return source
    if sourced.model_id is not None:
        root = logged_model_uri(connection, sourced.model_id)
        if root is None or not is_proxied(root):
            return None
        below = rest.split("/")[2:] if scheme == "runs" else source.removeprefix(root).strip("/").split("/")
        path = [] if scheme == "models" else below
        return uris.run_artifacts(sourced.model_id, *filter(None, path))
    if scheme == "runs":
        run_id, *path = rest.split("/")
        at = connection.execute(select(runs.c.artifact_uri).where(runs.c.id == run_id)).scalar()
        return uris.run_artifacts(run_id, *path) if at and is_proxied(at) else None
    owner = find_files_owner(connection, rest) if scheme == PROXY_SCHEME else None
    return None if owner is None else uris.run_artifacts(owner.id, owner.path).rstrip("/")


def describe_files(store: Store, records: FileHashes, location: str) -> tuple[str, dict[str, LoggedFiles]]:
    """Return the architecture and the files by format.

    Weights, and a folder that MLflow's clients logged.
    """
    try:
        sizes = {entry.uri: entry.size for entry in store.entries(location)} or {location: store.size(location)}
        weights = find_weights(location, list(sizes))
        found = {}
        if weights.files:
            found[WEIGHTS_FORMAT] = describe_weights(records, weights, sizes)
        if (mlmodel := f"{location}/{MLMODEL_FILE}") in sizes:
            flavors = read_flavors(read_small_file(store, mlmodel, sizes))
            found[MLFLOW_FORMAT] = describe_mlflow_folder(records, location, sizes, flavors)
        config = weights.config
        return read_architecture(read_small_file(store, config, sizes)) if config else "", found
    except (FileNotFoundError, BrokenArtifact):  # it is being replaced, or its name is not valid in the store
        return "", {}


def read_small_file(store: Store, location: str, sizes: Mapping[str, int]) -> bytes:
    """Read a file that describes a model; empty if it is too large for that."""
    return store.get_bytes(location) if sizes[location] <= MAX_CONFIG_BYTES else b""


def describe_weights(records: FileHashes, weights: WeightFiles, sizes: Mapping[str, int]) -> LoggedFiles:
    hashes = recorded_hashes(records, weights.files)
    checksum = (
        combined_checksum({location.rpartition("/")[2]: each for location, each in hashes.items()}) if hashes else None
    )
    return LoggedFiles(weights.location, sum(sizes[location] for location in weights.files), checksum)


def describe_mlflow_folder(
    records: FileHashes, location: str, sizes: Mapping[str, int], flavors: tuple[str, ...]
) -> LoggedFiles:
    hashes = recorded_hashes(records, tuple(sizes))
    checksum = (
        combined_checksum({uri.removeprefix(f"{location}/"): each for uri, each in hashes.items()}) if hashes else None
    )
    return LoggedFiles(f"{location}/", sum(sizes.values()), checksum, flavors)


def recorded_hashes(records: FileHashes, places: tuple[str, ...]) -> dict[str, str]:
    """Return the recorded hash of each file; empty if one is unknown or ambiguous."""
    if len(places) > MAX_FILES:
        return {}
    known = {location: {row.sha256 for row in records.at(location)} - {UNKNOWN_HASH} for location in places}
    return (
        {location: hashes.pop() for location, hashes in known.items()}
        if all(len(each) == 1 for each in known.values())
        else {}
    )
