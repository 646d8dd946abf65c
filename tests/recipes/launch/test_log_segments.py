"""The log of a pod: immutable ordered segments that survive store and disk failures."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.contracts.job import StoreAddress
from recipes.launch import log_segments
from recipes.launch.log_segments import LogSpool, LogUploader
from recipes.storage.artifact_store import Store

FOLDER = "s3://hanzo-ml/jobs/j/train/000001/logs/node-0"


@pytest.fixture
def stdout(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "stdout", os.O_CREAT | os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def spool(tmp_path: Path, stdout: int) -> LogSpool:
    return LogSpool(tmp_path / "spool", stdout)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    buckets = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=buckets))


def stored(store: Store) -> dict[str, bytes]:
    return {uri.rpartition("/")[2]: store.get_bytes(uri) for uri in sorted(store.list(FOLDER))}


def upload(spool: LogSpool, store: Store) -> None:
    uploader = LogUploader(spool, store, FOLDER)
    uploader.start()
    assert uploader.finish(30)


def test_segments_are_stored_in_order_and_leave_the_disk(tmp_path: Path, spool: LogSpool, store: Store) -> None:
    spool.write(b"one\n")
    spool.close_segment()
    spool.close_segment()
    spool.write(b"two\n")
    upload(spool, store)
    assert stored(store) == {"000000.log": b"one\n", "000001.log": b"two\n"}
    assert (tmp_path / "stdout").read_bytes() == b"one\ntwo\n"
    assert list((tmp_path / "spool").iterdir()) == []


def test_pod_that_joins_an_attempt_again_appends(tmp_path: Path, spool: LogSpool, store: Store, stdout: int) -> None:
    spool.write(b"one\n")
    upload(spool, store)
    again = LogSpool(tmp_path / "again", stdout)
    again.write(b"two\n")
    upload(again, store)
    assert stored(store) == {"000000.log": b"one\n", "000001.log": b"two\n"}


def test_full_spool_drops_only_the_stored_copy(
    tmp_path: Path, spool: LogSpool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_segments, "MAX_SPOOL_BYTES", 10)
    spool.write(b"0123456\n")
    spool.write(b"lost\n")
    upload(spool, store)
    spool.write(b"stored\n")
    upload(spool, store)
    assert (tmp_path / "stdout").read_bytes() == b"0123456\nlost\nstored\n"
    assert (
        b"".join(stored(store).values())
        == b"0123456\n\n... 5 bytes of output were not stored: no space to spool them\nstored\n"
    )


def test_unread_stdout_does_not_block_the_program(tmp_path: Path, store: Store) -> None:
    reading, writing = os.pipe()
    spool = LogSpool(tmp_path / "spool", writing)
    for _ in range(100):
        spool.write(b"x" * 10_000)
    upload(spool, store)
    assert sum(map(len, stored(store).values())) == 1_000_000
    assert len(os.read(reading, 1 << 20)) >= 4096, "what fits is passed on"
    spool.write(b"again\n")
    assert os.read(reading, 100) == b"again\n"
    os.close(reading)
    os.close(writing)


def test_reader_of_stdout_that_went_away_does_not_stop_the_program(tmp_path: Path, store: Store) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    spool = LogSpool(tmp_path / "spool", writing)
    spool.write(b"still here\n")
    os.close(writing)
    upload(spool, store)
    assert stored(store) == {"000000.log": b"still here\n"}
