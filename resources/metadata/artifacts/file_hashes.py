"""What SHA-256 each uploaded file has (row X7), recorded so that no moment of a crash makes a good file look broken.

Object store and database commit one after the other, so a file may have several rows. The rules:

- a row is written when all bytes have arrived, *before* the object is visible (`begin_upload`), and marked once the store
has it
  (`stored`). So whatever lies in the store has its row, also when the server dies in between;
- `stored` deletes the rows that were marked before its own was written: those objects were visible before, so this one has
  taken their place. Rows of uploads that run at the same time stay, for nobody knows which of the two came last;
- whatever lies in the store must have the hash of *one* of its rows. A flipped bit has none of them;
- a client that sends its parts to the S3 server itself lets nobody hash them on the way. Its row is `UNKNOWN_HASH` until the
  object was read once, right after its parts became one; where the server died in between, the first reader fixes the hash,
  unless something came there later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, insert, or_, select, update

from resources.metadata.database import Database
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import artifact_files as files

ABANDONED_UPLOAD_MS = 24 * 3600 * 1000
"""An upload that did not end within a day of its last byte never will."""
QUERY_BATCH = 500
UNKNOWN_HASH = ""
"""In the place of a hash: of bytes that did not come through this server and were not read yet."""


@dataclass(frozen=True)
class PendingUpload:
    """The row of an upload on its way, and the rows of what it will have replaced."""

    id: int
    uri: str
    replaces: tuple[int, ...]


@dataclass(frozen=True)
class RecordedHash:
    id: int
    sha256: str
    found_sha256: str | None


class FileHashes:
    """The records of uploaded files, by logical URI."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin_upload(self, uri: str, sha256: str, size: int) -> PendingUpload:
        """Say what will lie at `uri` in a moment."""
        now = now_ms()
        row = insert(files).values(uri=uri, sha256=sha256, size_bytes=size, stored=False, recorded_at=now)
        older = or_(files.c.stored.is_(True), files.c.recorded_at < now - ABANDONED_UPLOAD_MS)
        with self._database.write() as connection:
            replaces = connection.execute(select(files.c.id).where(files.c.uri == uri, older)).scalars().all()
            number = connection.execute(row.returning(files.c.id)).scalar_one()
        return PendingUpload(int(number), uri, tuple(replaces))

    def stored(self, arrival: PendingUpload) -> None:
        """Say that it lies there now."""
        self._store(arrival, stored=True)

    def finish_unknown_upload(self, arrival: PendingUpload, sha256: str, size: int) -> None:
        """Say that an `UNKNOWN_HASH` one lies there now, and what it is."""
        self._store(arrival, stored=True, sha256=sha256, size_bytes=size)

    def fix_unknown_hash(self, uri: str, sha256: str, size: int) -> None:
        """Fix the hash of what nobody has read before."""
        unseen = update(files).where(files.c.uri == uri, files.c.sha256 == UNKNOWN_HASH)
        with self._database.write() as connection:
            connection.execute(unseen.values(sha256=sha256, size_bytes=size, stored=True))

    def _store(self, arrival: PendingUpload, **values: str | int | bool) -> None:
        with self._database.write() as connection:
            connection.execute(update(files).where(files.c.id == arrival.id).values(**values))
            if arrival.replaces:
                connection.execute(delete(files).where(files.c.id.in_(arrival.replaces)))

    def at(self, uri: str) -> list[RecordedHash]:
        """The rows of one of which the bytes at `uri` must be; none where nothing was uploaded."""
        query = select(files.c.id, files.c.sha256, files.c.found_sha256, files.c.stored).where(files.c.uri == uri)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        # An `UNKNOWN_HASH` one that nobody ended would let every flipped bit pass, for good: a later one is what was
        # uploaded.
        last = max((row.id for row in rows if row.stored), default=0)
        known = (row for row in rows if row.sha256 != UNKNOWN_HASH or row.id > last)
        return [RecordedHash(row.id, row.sha256, row.found_sha256) for row in known]

    def list_stored_rows(self, uris: Sequence[str]) -> list[int]:
        """The rows to `forget` once these objects are deleted: not those of uploads that are on their way meanwhile."""
        found: list[int] = []
        with self._database.read() as connection:
            for start in range(0, len(uris), QUERY_BATCH):
                query = select(files.c.id).where(
                    files.c.uri.in_(uris[start : start + QUERY_BATCH]), files.c.stored.is_(True)
                )
                found.extend(connection.execute(query).scalars())
        return found

    def last_upload_ids(self, uris: Sequence[str]) -> dict[str, int]:
        """Of each of these objects the number of its last upload, which grows with time; 0 where none is known."""
        found = dict.fromkeys(uris, 0)
        with self._database.read() as connection:
            for start in range(0, len(uris), QUERY_BATCH):
                among = files.c.uri.in_(uris[start : start + QUERY_BATCH])
                query = select(files.c.uri, func.max(files.c.id)).where(among).group_by(files.c.uri)
                found |= {uri: int(number) for uri, number in connection.execute(query)}
        return found

    def forget(self, rows: Sequence[int]) -> None:
        with self._database.write() as connection:
            for start in range(0, len(rows), QUERY_BATCH):
                connection.execute(delete(files).where(files.c.id.in_(rows[start : start + QUERY_BATCH])))

    def report_broken(self, uri: str, owner: str, organization: str, expected: Sequence[str], found: str) -> None:
        """Write the event `artifact.broken`: for an uploaded file once for each new damage, however often it is read."""
        other = or_(files.c.found_sha256.is_(None), files.c.found_sha256 != found)
        with self._database.write() as connection:
            recorded = connection.execute(select(files.c.id).where(files.c.uri == uri)).scalars().all()
            changed = connection.execute(update(files).where(files.c.uri == uri, other).values(found_sha256=found))
            if changed.rowcount or not recorded:
                # The audit log shows an organization what is its own.
                payload = {
                    "organization": organization,
                    "uri": uri,
                    "expected_sha256": sorted(expected),
                    "found_sha256": found,
                }
                emit(connection, "audit", "artifact.broken", owner, payload)

    def mark_repaired(self, uri: str) -> None:
        """Forget a damage that is repaired: the next one is news."""
        with self._database.write() as connection:
            connection.execute(update(files).where(files.c.uri == uri).values(found_sha256=None))
