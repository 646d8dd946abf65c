"""SHA-256 of each uploaded file, recorded such that a crash invalidates no file.

Object store and database commit separately, so a file may have several rows. The rules:

- a row is written when all bytes have arrived, *before* the object is visible (`begin_upload`), and marked after the store
  has committed it (`stored`). Every stored object therefore has its row, even if the server is killed in between;
- `stored` deletes the rows that were marked before its own was written: their objects were visible earlier and have been
  overwritten. Rows of concurrent uploads are kept, because the order in which the store committed them is unknown;
- the content of a stored object must have the hash of *one* of its rows. A flipped bit matches none;
- parts that a client sends directly to the S3 server cannot be hashed in transit. Their row is `UNKNOWN_HASH` until the
  object is read once, right after the multipart upload completes. If the server dies in between, the first reader sets the
  hash, unless the object was overwritten since.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, insert, or_, select, update

from resources.metadata.database import Database
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import artifact_files as files

ABANDONED_UPLOAD_MS = 24 * 3600 * 1000
"""An upload that has not ended a day after its last byte is considered abandoned."""
QUERY_BATCH = 500
UNKNOWN_HASH = ""
"""Stored instead of a hash for bytes that did not pass through this server and have not been read yet."""


@dataclass(frozen=True)
class PendingUpload:
    """The row of an upload in progress, and the rows that it replaces."""

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
        """Record the hash of an object before it becomes visible at `uri`."""
        now = now_ms()
        row = insert(files).values(uri=uri, sha256=sha256, size_bytes=size, stored=False, recorded_at=now)
        older = or_(files.c.stored.is_(True), files.c.recorded_at < now - ABANDONED_UPLOAD_MS)
        with self._database.write() as connection:
            replaces = connection.execute(select(files.c.id).where(files.c.uri == uri, older)).scalars().all()
            number = connection.execute(row.returning(files.c.id)).scalar_one()
        return PendingUpload(int(number), uri, tuple(replaces))

    def stored(self, arrival: PendingUpload) -> None:
        """Record that the object is visible."""
        self._store(arrival, stored=True)

    def finish_unknown_upload(self, arrival: PendingUpload, sha256: str, size: int) -> None:
        """Record that an `UNKNOWN_HASH` object is visible, and its hash."""
        self._store(arrival, stored=True, sha256=sha256, size_bytes=size)

    def fix_unknown_hash(self, uri: str, sha256: str, size: int) -> None:
        """Set the hash of objects that had not been read before."""
        unseen = update(files).where(files.c.uri == uri, files.c.sha256 == UNKNOWN_HASH)
        with self._database.write() as connection:
            connection.execute(unseen.values(sha256=sha256, size_bytes=size, stored=True))

    def _store(self, arrival: PendingUpload, **values: str | int | bool) -> None:
        with self._database.write() as connection:
            connection.execute(update(files).where(files.c.id == arrival.id).values(**values))
            if arrival.replaces:
                connection.execute(delete(files).where(files.c.id.in_(arrival.replaces)))

    def at(self, uri: str) -> list[RecordedHash]:
        """Return the rows of which one must match the content at `uri`.

        Empty if nothing was uploaded.
        """
        query = select(files.c.id, files.c.sha256, files.c.found_sha256, files.c.stored).where(files.c.uri == uri)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        # An unfinished `UNKNOWN_HASH` row would accept every flipped bit for ever: if a later row is stored, that is the
        # uploaded content.
        last = max((row.id for row in rows if row.stored), default=0)
        known = (row for row in rows if row.sha256 != UNKNOWN_HASH or row.id > last)
        return [RecordedHash(row.id, row.sha256, row.found_sha256) for row in known]

    def list_stored_rows(self, uris: Sequence[str]) -> list[int]:
        """Return the rows to `forget` after these objects are deleted.

        Rows of uploads in progress are not included.
        """
        found: list[int] = []
        with self._database.read() as connection:
            for start in range(0, len(uris), QUERY_BATCH):
                query = select(files.c.id).where(
                    files.c.uri.in_(uris[start : start + QUERY_BATCH]), files.c.stored.is_(True)
                )
                found.extend(connection.execute(query).scalars())
        return found

    def last_upload_ids(self, uris: Sequence[str]) -> dict[str, int]:
        """Return the id of the last upload of each object, 0 if none is known.

        Ids grow with time.
        """
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
        """Emit `artifact.broken`: for an uploaded file once per new damage, not on every read."""
        other = or_(files.c.found_sha256.is_(None), files.c.found_sha256 != found)
        with self._database.write() as connection:
            recorded = connection.execute(select(files.c.id).where(files.c.uri == uri)).scalars().all()
            changed = connection.execute(update(files).where(files.c.uri == uri, other).values(found_sha256=found))
            if changed.rowcount or not recorded:
                # The audit log shows an organization only its own events.
                payload = {
                    "organization": organization,
                    "uri": uri,
                    "expected_sha256": sorted(expected),
                    "found_sha256": found,
                }
                emit(connection, "audit", "artifact.broken", owner, payload)

    def mark_repaired(self, uri: str) -> None:
        """Clear a recorded damage after its repair, so that the next one is reported."""
        with self._database.write() as connection:
            connection.execute(update(files).where(files.c.uri == uri).values(found_sha256=None))
