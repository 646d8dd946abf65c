"""Delete a dataset version, unless something was made from it.

Its number is never used again. The row is deleted first, in the transaction that checks the references to it. The files in
the object store are deleted afterwards; if the process is killed meanwhile, a later call continues.
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
    """Delete a version and everything that only it uses.

    Raises:
        HanzoError: 404 if there is no such version; 409 if runs, jobs or other versions refer to it, with their names.
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
    """Open a transaction that records artifacts made from a version.

    Such artifacts, for example checks and splits, are stored next to the version's files.

    Raises:
        HanzoError: 409 if the version was deleted meanwhile. The artifacts are then removed, because they contain records
        and
            nothing else would remove them; unless an equal version was prepared again, to which they belong.
    """
    with database.write() as connection:
        if lock_for_derivation(connection, version.id):
            yield connection
            return
    extra_uris = [artifact.uri for artifact in outputs if not artifact.uri.startswith(version.artifact.uri)]
    remove_leftovers(database, store, version, [uri.rpartition("/")[0] for uri in extra_uris])
    raise conflict(f"dataset {version.reference} was deleted while it was being examined")


def remove_leftovers(database: Database, store: Store, version: DatasetVersion, places: Iterable[str]) -> None:
    """Remove the files at some places of a deleted version.

    They are kept if an equal version has been created there since.
    """
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

    An artifact that also belongs to another version is kept for that one: equal data prepared under two names, before
    manifests named their place, has one digest. Deleting the row of one version once broke the proof of all models trained
    on the other.
    """
    own_digests = {artifact.digest for artifact in own_artifacts(connection, version)}
    others = shared_artifact_uris(connection, version, own_digests)
    for digest, uri in others.items():
        connection.execute(update(artifacts).where(artifacts.c.digest == digest).values(uri=uri))
    removed = own_digests - others.keys()
    connection.execute(delete(lineage_edges).where(lineage_edges.c.child.in_(removed)))
    connection.execute(delete(artifacts).where(artifacts.c.digest.in_(removed)))


def find_referrers(connection: Connection, version: DatasetVersion) -> list[str]:
    """Return the names of everything that refers to a version.

    What was made from another version's equal artifact is not included: it loses nothing (see `remove_from_lineage`).
    """
    shared = shared_artifact_uris(connection, version, version_digests(version))
    outputs = [child.name for child in find_children(connection, version, but=shared) if not is_own_part(version, child)]
    query = select(jobs.c.id).where(
        jobs.c.organization == version.organization, jobs.c.config["dataset"].as_string() == version.reference
    )
    waiting = [f"job {id}" for id in connection.execute(query.order_by(jobs.c.submitted_at)).scalars()]
    return sorted(dict.fromkeys([*outputs, *waiting]))
