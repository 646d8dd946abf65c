"""Claims that keep chunks from deletion, and the removal of chunks that nobody needs."""

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

# Which chunks are held by whom: so it is safe to leave out a chunk that is there, and to remove one that nobody needs.
#
# A holder claims chunks before it looks which of them are there, and whoever removes one does so under a lock that no
# claim passes: so what was there after the claim stays. A holder is a dataset version, or what is on its way to become
# one; whatever was killed on its way, or while it was deleted, is removed a day later by whoever comes by.

DAY_MS = 24 * 3600 * 1000
DEAD_AT = -1
"""Time at which a holder was seen that nobody may be any more."""
REMOVAL_BATCH = 64
"""Chunks that are removed under one lock: on SQLite nobody writes meanwhile."""
POSTGRES_CHUNK_LOCK = 57_000_002


class ChunkClaims:
    """The claims of one organization, below whose datasets at `place` the chunks lie."""

    def __init__(self, database: Database, organization: str, place: str) -> None:
        self._database = database
        self._organization = organization
        self._place = place

    def open(self, holder: str) -> None:
        with self._database.write() as connection:
            row = {"id": holder, "organization": self._organization, "place": "", "updated_at": now_ms()}
            connection.execute(insert(holders).values(**row))

    def claim(self, holder: str, hashes: Collection[str]) -> None:
        """Hold chunks, whether they are there or not yet."""
        with self._database.write() as connection:
            self._lock(connection, "pg_advisory_xact_lock_shared")
            self.keep_alive(connection, holder)
            rows = [{"organization": self._organization, "sha256": sha256, "holder": holder} for sha256 in sorted(hashes)]
            connection.execute(insert_into(connection, claims).on_conflict_do_nothing(), rows)

    def keep_alive(self, connection: Connection, holder: str, place: str | None = None) -> None:
        """Say that a holder is at work, and where it is about to put what is its own.

        Raises:
            HanzoError: 409 where it was taken for dead, and what it held is gone.
        """
        values: dict[str, object] = {"updated_at": now_ms()} | ({"place": place} if place is not None else {})
        alive = (holders.c.id == holder) & (holders.c.updated_at != DEAD_AT)
        if connection.execute(update(holders).where(alive).values(**values).returning(holders.c.id)).first() is None:
            raise conflict("the upload stood still for a day, and its beginning was removed: send it again")

    def claim_for_deletion(self, connection: Connection, version: str, place: str) -> None:
        """In the transaction that deletes a version: what lies at its place goes with its chunks."""
        row = {"id": version, "organization": self._organization, "place": place, "updated_at": now_ms()}
        holder = insert_into(connection, holders).values(**row)
        connection.execute(
            holder.on_conflict_do_update(index_elements=["id"], set_={"place": place, "updated_at": now_ms()})
        )

    def release(self, store: Store, holder: str) -> int:
        """Remove what only this holder holds, unless it is a version. Returns how many chunks that were.

        Killed at any moment, it is done again later.
        """
        return sum(self._release(store, place, id) for id, place in self._condemn(holders.c.id == holder))

    def release_abandoned(self, store: Store) -> None:
        """Release every holder of a day ago that is no version."""
        old = (holders.c.organization == self._organization) & (holders.c.updated_at < now_ms() - DAY_MS)
        for holder, place in self._condemn(old):
            self._release(store, place, holder)

    def finish_deletion(self, store: Store, place: str) -> None:
        """End what was killed while it deleted the version at a place, before another is made there."""
        for holder, _ in self._condemn((holders.c.organization == self._organization) & (holders.c.place == place)):
            self._release(store, place, holder)

    def check_not_being_deleted(self, connection: Connection, place: str) -> None:
        """In the transaction that makes a version at a place where there was one before.

        Raises:
            HanzoError: 409 where that one's files are still being removed, and the new one's with them.
        """
        at_place = (holders.c.organization == self._organization) & (holders.c.place == place)
        if connection.execute(select(holders.c.id).where(at_place)).first() is not None:
            raise conflict("the same was prepared before, and is being deleted just now: ask for it again")

    def _condemn(self, which: ColumnElement[bool]) -> list[tuple[str, str]]:
        """Declare holders that are no versions dead, and nothing brings them back. Returns their ids and places.

        They are locked by a statement of its own: one that waits for a holder that becomes a version in that moment does not
        see the version afterwards, only the next does.
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
        """Remove what lies at a holder's place, for as long as there is the holder.

        Once another has ended this deletion, the same may be made there anew; who was still at it took of that.
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
        """The next chunks; None when nothing was left, and the holder is gone too."""
        with self._database.write() as connection:
            self._lock(connection, "pg_advisory_xact_lock")
            own_claims = (claims.c.holder == holder) & (claims.c.organization == self._organization)
            # By the holder alone: by the organization too, SQLite went through all claims of the others for each batch.
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
        """Shared by claims, alone for a removal. SQLite has one writer anyway."""
        if connection.dialect.name == "postgresql":
            statement = text(f"SELECT {function}(:space, hashtext(:organization))")
            connection.execute(statement, {"space": POSTGRES_CHUNK_LOCK, "organization": self._organization})
