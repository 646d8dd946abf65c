"""Deleting a dataset version (row B19): only where nothing was made of it, and never its number.

The row goes first, in one transaction with the look at who refers to it; then, killed at any moment and done again later,
what lies in the object store.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, delete, select, update

from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.errors import conflict
from resources.lineage.dataset_lineage import (
    find_children,
    is_own_part,
    own_artifacts,
    shared_artifact_uris,
    version_digests,
)
from resources.metadata.database import Database
from resources.metadata.datasets import (
    Datasets,
    DatasetVersion,
    dataset_folder,
    lock_for_deletion,
    lock_for_derivation,
    new_id,
)
from resources.metadata.tables import artifacts, dataset_versions, jobs, lineage_edges
from resources.object_store.chunk_claims import ChunkClaims

MAX_SHOWN = 5


def delete_version(database: Database, store: Store, identifier: str, user: str) -> DatasetVersion:
    """Delete a version and all that only it holds.

    Raises:
        HanzoError: 404 where there is none; 409 where runs, jobs or other versions refer to it, with their names.
    """
    datasets = Datasets(database)
    with database.write() as connection:
        lock_for_deletion(connection, identifier)
        version = datasets.get(identifier, connection)
        if names := find_referrers(connection, version):
            more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
            raise conflict(f"dataset {version.reference} is not deleted: {', '.join(names[:MAX_SHOWN])}{more} refer to it")
        claims = version_claims(database, version)
        claims.claim_for_deletion(connection, version.id, version.storage_path)
        remove_from_lineage(connection, version)
        datasets.remove(connection, version, user)
    claims.release(store, version.id)
    return version


@contextmanager
def output_transaction(
    database: Database, store: Store, version: DatasetVersion, outputs: Sequence[Artifact]
) -> Iterator[Connection]:
    """A transaction that records what was made of a version and lies beside its files: checks, splits.

    Raises:
        HanzoError: 409 where it was deleted meanwhile. What was made is removed then: records stand in it, and nobody else
            would come by. Where the same was prepared anew, it lies beside that version.
    """
    with database.write() as connection:
        if lock_for_derivation(connection, version.id):
            yield connection
            return
    extra_uris = [artifact.uri for artifact in outputs if not artifact.uri.startswith(version.artifact.uri)]
    remove_leftovers(database, store, version, [uri.rpartition("/")[0] for uri in extra_uris])
    raise conflict(f"dataset {version.reference} was deleted while it was looked at")


def remove_leftovers(database: Database, store: Store, version: DatasetVersion, places: Iterable[str]) -> None:
    """Remove what lies at some places of a version that was deleted, unless an equal one lies there since."""
    claims, leftovers = version_claims(database, version), dict[str, str]()
    with database.write() as connection:
        at_place = dataset_versions.c.storage_path == version.storage_path
        if connection.execute(select(dataset_versions.c.id).where(at_place)).first() is None:
            leftovers = {place: new_id() for place in dict.fromkeys(places)}
        for place, leftover in leftovers.items():
            claims.claim_for_deletion(connection, leftover, place)
    for leftover in leftovers.values():
        claims.release(store, leftover)


def version_claims(database: Database, version: DatasetVersion) -> ChunkClaims:
    return ChunkClaims(database, version.organization, dataset_folder(version.organization, version.name))


def remove_from_lineage(connection: Connection, version: DatasetVersion) -> None:
    """Remove a version's artifacts from lineage.

    One that is another version's too stays, as that one's: what was prepared alike under two names before manifests named
    their place has one digest. With the row of the one went the proof of all models that were trained on the other.
    """
    own_digests = {artifact.digest for artifact in own_artifacts(connection, version)}
    others = shared_artifact_uris(connection, version, own_digests)
    for digest, uri in others.items():
        connection.execute(update(artifacts).where(artifacts.c.digest == digest).values(uri=uri))
    removed = own_digests - others.keys()
    connection.execute(delete(lineage_edges).where(lineage_edges.c.child.in_(removed)))
    connection.execute(delete(artifacts).where(artifacts.c.digest.in_(removed)))


def find_referrers(connection: Connection, version: DatasetVersion) -> list[str]:
    """Who refers to a version, each with a word for what it is. What was made of another's too loses nothing:
    `remove_from_lineage`.
    """
    shared = shared_artifact_uris(connection, version, version_digests(version))
    outputs = [child.name for child in find_children(connection, version, but=shared) if not is_own_part(version, child)]
    query = select(jobs.c.id).where(
        jobs.c.organization == version.organization, jobs.c.config["dataset"].as_string() == version.reference
    )
    waiting = [f"job {id}" for id in connection.execute(query.order_by(jobs.c.submitted_at)).scalars()]
    return sorted(dict.fromkeys([*outputs, *waiting]))
