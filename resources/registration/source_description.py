"""What a version says of itself whose files a client points at (row O1): what its run logged, and what lies at its source.

A client may point at what nobody here can look into, and nothing of that is known. Of what lies in the store nothing is
read but what describes it: weights may have hundreds of GB, and are told with the hash that they came in with, or none.
"""

from collections.abc import Mapping

from sqlalchemy import Connection, select

from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.metadata.artifacts.artifact_locations import PROXY, is_proxied
from resources.metadata.artifacts.file_hashes import UNSEEN, ArtifactFiles
from resources.metadata.artifacts.locations import files_owner
from resources.metadata.database import Database
from resources.metadata.registry.download_uri import files_of_model
from resources.metadata.registry.model_key import ModelKey
from resources.metadata.registry.model_version_sources import Sourced
from resources.metadata.registry.model_versions import LoggedFiles, ModelVersion, find_version
from resources.metadata.registry.registry import Pointed
from resources.metadata.registry.source_uris import LOGGED_MODEL, is_stored
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import runs
from resources.metadata.tracking.run_search import RunSearch
from resources.metadata.tracking.runs import Runs
from resources.registration.model_facts import (
    FORMAT,
    MAX_CONFIG_BYTES,
    MLFLOW,
    MLMODEL,
    Weights,
    architecture_in,
    checksum_of,
    flavors_in,
    weights_in,
)
from resources.run_facts import facts_of

MOST_FILES = 500
"""Of a folder, to be looked up one by one: a model has ten or a hundred."""


def pointed_at(database: Database, store: Store, sourced: Sourced, organization: str) -> Pointed:
    """What is known of a source that was checked."""
    with database.read() as connection:
        if (original := copied(connection, sourced, organization)) is not None:
            return as_original(original)
        place = stored_place(connection, sourced)
        known = select(runs.c.id).where(runs.c.id == sourced.run_id, runs.c.organization == organization)
        run_id = connection.execute(known).scalar()
    architecture, files = described(store, ArtifactFiles(database), place) if place else ("", {})
    if run_id is None:  # it is another server's
        return Pointed(architecture=architecture, artifacts=files)
    facts = facts_of(RunSearch(database).get(Runs(database).get(run_id)))
    return Pointed(architecture, facts.base_model, facts.method, files, facts.metrics, facts.training_config)


def copied(connection: Connection, sourced: Sourced, organization: str) -> ModelVersion | None:
    """The version that a source names as `models:/NAME/NUMBER`."""
    scheme, _, rest = sourced.source.partition(":/")
    if scheme != "models" or LOGGED_MODEL.fullmatch(rest):
        return None
    name, _, number = rest.rpartition("/")
    return find_version(connection, ModelKey(organization, name).of(versions), versions.c.version == int(number))


def as_original(version: ModelVersion) -> Pointed:
    """As the version that it is made of, but for what was made here: that is proved, exported and served as the original."""
    logged = {format: LoggedFiles(**each) for format, each in version.artifacts.items() if "artifact" not in each}
    return Pointed(
        version.architecture, version.base_model, version.method, logged, version.metrics, version.training_config
    )


def stored_place(connection: Connection, sourced: Sourced) -> str | None:
    """Where in the store a source lies; None where it lies elsewhere, or nobody knows."""
    source = sourced.source.rstrip("/")
    scheme, _, rest = source.partition(":/")
    if is_stored(source):
        return source
    if sourced.model_id is not None:
        root = files_of_model(connection, sourced.model_id)
        if root is None or not is_proxied(root):
            return None
        below = rest.split("/")[2:] if scheme == "runs" else source.removeprefix(root).strip("/").split("/")
        path = [] if scheme == "models" else below
        return uris.run_artifacts(sourced.model_id, *filter(None, path))
    if scheme == "runs":
        run_id, *path = rest.split("/")
        at = connection.execute(select(runs.c.artifact_uri).where(runs.c.id == run_id)).scalar()
        return uris.run_artifacts(run_id, *path) if at and is_proxied(at) else None
    owner = files_owner(connection, rest) if scheme == PROXY else None
    return None if owner is None else uris.run_artifacts(owner.id, owner.path).rstrip("/")


def described(store: Store, records: ArtifactFiles, place: str) -> tuple[str, dict[str, LoggedFiles]]:
    """The architecture that files name, and they by their formats: weights, and a folder that MLflow's clients logged."""
    try:
        sizes = {entry.uri: entry.size for entry in store.entries(place)} or {place: store.size(place)}
        weights = weights_in(place, list(sizes))
        found = {}
        if weights.files:
            found[FORMAT] = of_weights(records, weights, sizes)
        if (mlmodel := f"{place}/{MLMODEL}") in sizes:
            flavors = flavors_in(small(store, mlmodel, sizes))
            found[MLFLOW] = of_folder(records, place, sizes, flavors)
        config = weights.config
        return architecture_in(small(store, config, sizes)) if config else "", found
    except (FileNotFoundError, BrokenArtifact):  # it is being replaced, or no name for a place here
        return "", {}


def small(store: Store, place: str, sizes: Mapping[str, int]) -> bytes:
    """A description; nothing of one that is none, by its size."""
    return store.get_bytes(place) if sizes[place] <= MAX_CONFIG_BYTES else b""


def of_weights(records: ArtifactFiles, weights: Weights, sizes: Mapping[str, int]) -> LoggedFiles:
    hashes = known_hashes(records, weights.files)
    checksum = checksum_of({place.rpartition("/")[2]: each for place, each in hashes.items()}) if hashes else None
    return LoggedFiles(weights.place, sum(sizes[place] for place in weights.files), checksum)


def of_folder(records: ArtifactFiles, place: str, sizes: Mapping[str, int], flavors: tuple[str, ...]) -> LoggedFiles:
    hashes = known_hashes(records, tuple(sizes))
    checksum = checksum_of({uri.removeprefix(f"{place}/"): each for uri, each in hashes.items()}) if hashes else None
    return LoggedFiles(f"{place}/", sum(sizes.values()), checksum, flavors)


def known_hashes(records: ArtifactFiles, places: tuple[str, ...]) -> dict[str, str]:
    """The recorded hash of every file; of none where one is not known, or may be one of several."""
    if len(places) > MOST_FILES:
        return {}
    known = {place: {row.sha256 for row in records.at(place)} - {UNSEEN} for place in places}
    return {place: hashes.pop() for place, hashes in known.items()} if all(len(each) == 1 for each in known.values()) else {}
