"""Claims that keep chunks from deletion, and the removal of unused chunks."""

from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, Connection, delete, exists, insert, select, text, update

from recipes.storage.artifact_store import Store
from recipes.storage.locations import chunk_uri
from resources.errors import conflict
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.tables import chunk_claims as claims
from resources.metadata.tables import dataset_holders as holders
from resources.metadata.tables import dataset_versions
from resources.metadata.transactions import insert_into

# Claims record who uses which chunks, so that it is safe to skip the upload of an existing chunk and to remove an unused
# one.
#
# A holder claims chunks before it checks which of them exist, and a removal uses a lock that excludes claims: so a chunk
# that existed after the claim stays. A holder is a dataset version or an upload that is to become one. What an aborted
# upload or deletion leaves is removed a day later by the next call of `release_abandoned`.

DAY_MS = 24 * 3600 * 1000
DEAD_AT = -1
"""The `updated_at` of a holder that was released and may not be used again."""
REMOVAL_BATCH = 64
"""Chunks that are removed under one lock: on SQLite it blocks all writes."""
POSTGRES_CHUNK_LOCK = 57_000_002


class ChunkClaims:
    """The claims of one organization, whose chunks are below its datasets' folder at `place`."""

    def __init__(self, database: Database, organization: str, place: str) -> None:
        self._database = database
        self._organization = organization
        self._place = place

    def open(self, holder: str) -> None:
        with self._database.write() as connection:
            row = {"id": holder, "organization": self._organization, "place": "", "updated_at": now_ms()}
            connection.execute(insert(holders).values(**row))

    def claim(self, holder: str, hashes: Collection[str]) -> None:
        """Claim chunks, whether or not they exist yet."""
        with self._database.write() as connection:
            self._lock(connection, "pg_advisory_xact_lock_shared")
            self.keep_alive(connection, holder)
            rows = [{"organization": self._organization, "sha256": sha256, "holder": holder} for sha256 in sorted(hashes)]
            connection.execute(insert_into(connection, claims).on_conflict_do_nothing(), rows)

    def keep_alive(self, connection: Connection, holder: str, place: str | None = None) -> None:
        """Mark a holder as active.

        `place` is the folder to which it is about to write.

        Raises:
            HanzoError: 409 if it was considered dead, and its chunks were removed.
        """
        values: dict[str, object] = {"updated_at": now_ms()} | ({"place": place} if place is not None else {})
        alive = (holders.c.id == holder) & (holders.c.updated_at != DEAD_AT)
        if connection.execute(update(holders).where(alive).values(**values).returning(holders.c.id)).first() is None:
            raise conflict("the upload made no progress for a day, and what it had sent was removed: send it again")

    def claim_for_deletion(self, connection: Connection, version: str, place: str) -> None:
        """Mark the files at a version's place for removal with its chunks.

        Called within the transaction that deletes the version.
        """
        row = {"id": version, "organization": self._organization, "place": place, "updated_at": now_ms()}
        holder = insert_into(connection, holders).values(**row)
        connection.execute(
            holder.on_conflict_do_update(index_elements=["id"], set_={"place": place, "updated_at": now_ms()})
        )

    def release(self, store: Store, holder: str) -> int:
        """Remove what only this holder uses, unless it is a version.

        Returns the number of removed chunks.

        If the process is killed meanwhile, a later call continues.
        """
        return sum(self._release(store, place, id) for id, place in self._condemn(holders.c.id == holder))

    def release_abandoned(self, store: Store) -> None:
        """Release all holders that are not versions and were inactive for a day."""
        old = (holders.c.organization == self._organization) & (holders.c.updated_at < now_ms() - DAY_MS)
        for holder, place in self._condemn(old):
            self._release(store, place, holder)

    def finish_deletion(self, store: Store, place: str) -> None:
        """Complete an aborted deletion at a place, before a version is created there."""
        for holder, _ in self._condemn((holders.c.organization == self._organization) & (holders.c.place == place)):
            self._release(store, place, holder)

    def check_not_being_deleted(self, connection: Connection, place: str) -> None:
        """Check that no earlier version at a place is being deleted.

        Called within the transaction that creates a version there.

        Raises:
            HanzoError: 409 if it is: the removal would also delete the new version's files.
        """
        at_place = (holders.c.organization == self._organization) & (holders.c.place == place)
        if connection.execute(select(holders.c.id).where(at_place)).first() is not None:
            raise conflict("an earlier version with the same contents is being deleted: try again in a moment")

    def _condemn(self, which: ColumnElement[bool]) -> list[tuple[str, str]]:
        """Mark holders that are not versions as dead for good.

        Returns their ids and places.

        The rows are locked by a separate statement: a statement that waits for a holder which becomes a version meanwhile
        does not see the version afterwards; only the next statement does.
        """
        lives = exists().where(dataset_versions.c.id == holders.c.id)
        found = select(holders.c.id).where(which).order_by(holders.c.id).with_for_update()
        with self._database.write() as connection:
            held = holders.c.id.in_(connection.execute(found).scalars().all())
            dead = update(holders).where(held & ~lives).values(updated_at=DEAD_AT).returning(holders.c.id, holders.c.place)
            return [(row.id, row.place) for row in connection.execute(dead)]

    def _release(self, store: Store, place: str, holder: str) -> int:
        if place:
            self._remove_all(store, place, holder)
        removed = 0
        while (batch := self._release_some(store, holder)) is not None:
            removed += batch
        return removed

    def _remove_all(self, store: Store, place: str, holder: str) -> None:
        """Remove what is at a holder's place, as long as the holder exists.

        Once another process has completed this deletion, the same version may be created again: its files must not be
        removed.
        """
        objects = store.list_deletions(place)
        for begin in range(0, len(objects), REMOVAL_BATCH):
            with self._database.write() as connection:
                still = select(holders.c.id).where((holders.c.id == holder) & (holders.c.updated_at == DEAD_AT))
                if connection.execute(still.with_for_update()).first() is None:
                    return
                for uri in objects[begin : begin + REMOVAL_BATCH]:
                    store.remove(uri)

    def _release_some(self, store: Store, holder: str) -> int | None:
        """Release the next batch of chunks, and return how many were removed.

        None if none is left and the holder is deleted.
        """
        with self._database.write() as connection:
            self._lock(connection, "pg_advisory_xact_lock")
            own_claims = (claims.c.holder == holder) & (claims.c.organization == self._organization)
            # Filter by holder only: with the organization as well, SQLite scanned all claims of other holders for each
            # batch.
            held = select(claims.c.sha256).where(claims.c.holder == holder).limit(REMOVAL_BATCH)
            batch = list(connection.execute(held).scalars())
            if not batch:
                connection.execute(delete(holders).where(holders.c.id == holder))
                return None
            unneeded = set(batch) - self._held_by_others(connection, holder, batch)
            for sha256 in sorted(unneeded):
                store.remove(chunk_uri(self._place, sha256))
            connection.execute(delete(claims).where(own_claims & claims.c.sha256.in_(batch)))
        return len(unneeded)

    def _held_by_others(self, connection: Connection, holder: str, hashes: Sequence[str]) -> set[str]:
        others = (claims.c.organization == self._organization) & (claims.c.holder != holder)
        return set(connection.execute(select(claims.c.sha256).where(others & claims.c.sha256.in_(hashes))).scalars())

    def _lock(self, connection: Connection, function: str) -> None:
        """Take the chunk lock.

        Shared for claims, exclusive for a removal. SQLite has only one writer.
        """
        if connection.dialect.name == "postgresql":
            statement = text(f"SELECT {function}(:space, hashtext(:organization))")
            connection.execute(statement, {"space": POSTGRES_CHUNK_LOCK, "organization": self._organization})
