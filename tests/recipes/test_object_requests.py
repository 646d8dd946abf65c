"""What the store is asked, and what an answer does not say."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError

from recipes.objects import PART, Objects
from tests.s3_server import VARIABLES, S3Server

URI = "s3://hanzo-models/m/1/file"


async def arriving(size: int) -> AsyncIterator[bytes]:
    yield bytes(size)


@pytest.mark.parametrize(("size", "methods"), [(100, ["PUT"]), (PART, ["POST", "PUT", "POST"])])
def test_a_stream_of_less_than_a_part_takes_one_request(s3: S3Server, size: int, methods: list[str]) -> None:
    objects = Objects(s3.address, VARIABLES)
    s3.requests.clear()
    asyncio.run(objects.put_stream(URI, arriving(size), size))
    assert [request.method for request in s3.requests] == methods


def test_with_keys_that_may_not_list_what_is_missing_is_missing(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the bucket is there they cannot tell."""

    def denied(*given: Any, **named: Any) -> Any:
        raise PermissionDeniedError("AccessDenied: you may not list")

    monkeypatch.setattr(obstore, "list", denied)
    with pytest.raises(FileNotFoundError):
        Objects(s3.address, VARIABLES).open(URI)
