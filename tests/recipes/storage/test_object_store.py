"""Calls of the object store to its library, and ambiguous answers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError

from recipes.storage.object_store import ObjectStore
from recipes.storage.object_transfer import MIN_PART_BYTES
from tests.support.s3_server import VARIABLES, S3Server

URI = "s3://hanzo-models/m/1/file"


async def arriving(size: int) -> AsyncIterator[bytes]:
    yield bytes(size)


@pytest.mark.parametrize(("size", "methods"), [(100, ["PUT"]), (MIN_PART_BYTES, ["POST", "PUT", "POST"])])
def test_a_stream_of_less_than_a_part_takes_one_request(s3: S3Server, size: int, methods: list[str]) -> None:
    objects = ObjectStore(s3.address, VARIABLES)
    s3.requests.clear()
    asyncio.run(objects.put_stream(URI, arriving(size), size))
    assert [request.method for request in s3.requests] == methods


@pytest.mark.parametrize("at_once", [1, 3])
def test_file_upload_uses_the_requested_concurrency(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Of many concurrent files each has one request, because all are held in memory."""
    options = record_options("put", monkeypatch)
    (tmp_path / "file").write_bytes(bytes(9 << 20))
    ObjectStore(s3.address, VARIABLES).put_file(URI, tmp_path / "file", at_once)
    assert [named["max_concurrency"] for named in options] == [at_once]


def test_stream_upload_has_two_parts_in_flight(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has many such uploads at a time."""
    options = record_options("put_async", monkeypatch)
    asyncio.run(ObjectStore(s3.address, VARIABLES).put_stream(URI, arriving(MIN_PART_BYTES)))
    assert [named["max_concurrency"] for named in options] == [2]


def test_object_of_known_size_is_read_with_one_request(s3: S3Server) -> None:
    objects = ObjectStore(s3.address, VARIABLES)
    objects.put_bytes(URI, b"0123456789")
    s3.requests.clear()
    assert b"".join(objects.open_known_size(URI, 10).chunks(2, 5)) == b"234"
    assert [request.method for request in s3.requests] == ["GET"]


def record_options(name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the options that a library function is called with."""
    recorded: list[dict[str, Any]] = []
    does = getattr(obstore, name)

    def remembered(*given: Any, **named: Any) -> Any:
        recorded.append(named)
        return does(*given, **named)

    monkeypatch.setattr(obstore, name, remembered)
    return recorded


def test_missing_object_is_not_found_without_list_permission(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that permission, whether the bucket exists is unknown."""

    def denied(*given: Any, **named: Any) -> Any:
        raise PermissionDeniedError("AccessDenied: you may not list")

    monkeypatch.setattr(obstore, "list", denied)
    with pytest.raises(FileNotFoundError):
        ObjectStore(s3.address, VARIABLES).open(URI)
