"""Hashes of uploaded files: recorded for every stored file, despite interruptions at any step."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from resources.metadata.artifacts.file_hashes import FileHashes, PendingUpload
from resources.metadata.database import Database
from resources.metadata.outbox import read_after

BUCKETS = {"datasets": "d", "checkpoints": "c", "models": "m"}
Step = Callable[[], None]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class File:
    """One file with stepwise operations and a reader's integrity check."""

    def __init__(self, store: Store, records: FileHashes, name: str) -> None:
        self.store = store
        self.records = records
        self.uri = f"s3://hanzo-ml/runs/r/artifacts/{name}"

    def upload(self, data: bytes) -> list[Step]:
        arrivals: list[PendingUpload] = []
        return [
            lambda: arrivals.append(self.records.begin_upload(self.uri, sha256(data), len(data))),
            lambda: self.store.put_bytes(self.uri, data),
            lambda: self.records.stored(arrivals[0]),
        ]

    def delete(self) -> list[Step]:
        rows: list[int] = []
        return [
            lambda: rows.extend(self.records.list_stored_rows([self.uri])),
            lambda: self.store.delete(self.uri),
            lambda: self.records.forget(rows),
        ]

    def is_whole(self) -> bool:
        try:
            found = self.store.sha256(self.uri)
        except FileNotFoundError:
            return True
        return found in {row.sha256 for row in self.records.at(self.uri)}


def merged(left: Sequence[Step], right: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield every order in which two actors can take their steps."""
    if not left or not right:
        yield [*left, *right]
        return
    for rest in merged(left[1:], right):
        yield [left[0], *rest]
    for rest in merged(left, right[1:]):
        yield [right[0], *rest]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS))


@pytest.mark.parametrize("other", ["upload", "delete"])
def test_file_reads_as_whole_after_any_interleaving_and_interruption(store: Store, sqlite_url: str, other: str) -> None:
    """Run two actors on an existing file in every order, each killed after any step."""
    database = Database(sqlite_url)
    records = FileHashes(database)
    number = 0
    for first, second in product(range(4), range(4)):
        orders = sum(1 for _ in merged([print] * first, [print] * second))
        for order in range(orders):
            number += 1
            file = File(store, records, str(number))
            for step in file.upload(b"old"):
                step()
            left = file.upload(b"left")[:first]
            right = (file.upload(b"right") if other == "upload" else file.delete())[:second]
            for step in list(merged(left, right))[order]:
                step()
                assert file.is_whole(), (first, second, order)
            assert sha256(b"another") not in {row.sha256 for row in records.at(file.uri)}
            # The next upload is whole as well, and leaves no hashes but those of uploads possibly in progress.
            for step in file.upload(b"next"):
                step()
                assert file.is_whole(), (first, second, order)
    assert number > 60
    database.close()


def test_replaced_content_is_no_longer_accepted_for_a_file(store: Store, database: Database) -> None:
    file = File(store, FileHashes(database), "f")
    for data in (b"one", b"two", b"three"):
        for step in file.upload(data):
            step()
    assert [row.sha256 for row in file.records.at(file.uri)] == [sha256(b"three")]
    store.put_bytes(file.uri, b"one")
    assert not file.is_whole()


def test_forgetting_many_files_keeps_the_others(database: Database) -> None:
    records = FileHashes(database)
    uris = [f"s3://hanzo-ml/runs/r/artifacts/{number}" for number in range(1100)]
    for uri in uris[:2] + uris[-2:]:
        records.stored(records.begin_upload(uri, "0" * 64, 1))
    rows = records.list_stored_rows(uris[1:])
    assert len(rows) == 3
    records.forget(rows)
    assert [bool(records.at(uri)) for uri in (uris[0], uris[1], uris[-1])] == [True, False, False]


def test_damage_is_reported_once_until_it_changes(database: Database) -> None:
    records = FileHashes(database)
    uri = "s3://hanzo-ml/runs/r/artifacts/f"
    records.stored(records.begin_upload(uri, "a" * 64, 1))

    def broken_hashes() -> list[str]:
        with database.read() as connection:
            return [event.payload["found_sha256"] for event in read_after(connection, 0, ["artifact.broken"])]

    for found in ("b", "b", "c", "c"):
        records.report_broken(uri, "r", "o", ["a" * 64], found * 64)
    assert broken_hashes() == ["b" * 64, "c" * 64]
    records.mark_repaired(uri)
    records.report_broken(uri, "r", "o", ["a" * 64], "c" * 64)
    assert broken_hashes() == ["b" * 64, "c" * 64, "c" * 64]
