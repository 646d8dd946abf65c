"""Listings of the store are complete and ordered by name across any number of requests."""

from pathlib import Path

import pytest

from recipes.contracts.job import StoreAddress
from recipes.storage.object_store import ObjectEntry, ObjectStore
from tests.support.s3_server import BUCKETS, VARIABLES, S3Server
from tests.support.server_process import ServerProcess
from tests.support.signed_store import program_job, store_in_pod, submit

PLACE = "s3://hanzo-models/many"
NAMES = [*(f"{number}" for number in range(60)), "a/b", "a-b", "a.b", "é", "z/y/x"]
AT_ONCE = 7


@pytest.fixture
def in_folder(tmp_path: Path) -> ObjectStore:
    """Create the objects in reverse order of their names."""
    objects = ObjectStore(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS))
    for name in reversed(NAMES):
        objects.put_bytes(f"{PLACE}/{name}", name.encode())
    return objects


@pytest.fixture
def in_s3(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """List a few objects per request, as S3 lists at most a thousand."""
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", f"{AT_ONCE}")
    for name in NAMES:
        s3.client.put_object(Bucket="hanzo-models", Key=f"many/{name}", Body=name.encode())
    s3.client.put_object(Bucket="hanzo-models", Key="many", Body=b"at the place itself")
    s3.client.put_object(Bucket="hanzo-models", Key="many-more", Body=b"beside it")
    s3.requests.clear()
    return ObjectStore(s3.address, VARIABLES)


def check(objects: ObjectStore) -> None:
    entries = [ObjectEntry(f"{PLACE}/{name}", len(name.encode())) for name in sorted(NAMES)]
    assert objects.entries(PLACE) == entries
    assert objects.list(PLACE) == [entry.uri for entry in entries]
    files, folders = objects.list_folder(f"{PLACE}/")
    assert files == [ObjectEntry(f"{PLACE}/{name}", len(name.encode())) for name in sorted(NAMES) if "/" not in name]
    assert folders == [f"{PLACE}/a", f"{PLACE}/z"]


def test_a_folder_is_listed_in_the_order_of_names(in_folder: ObjectStore) -> None:
    check(in_folder)


def test_s3_listing_follows_all_pages(in_s3: ObjectStore, s3: S3Server) -> None:
    check(in_s3)
    asked = [request for request in s3.requests if "list-type" in request.query]
    assert len([request for request in asked if "continuation-token" in request.query]) >= 2 * len(NAMES) // AT_ONCE


def test_pod_listing_equals_s3_listing(in_s3: ObjectStore, server_of_pods: ServerProcess) -> None:
    job = program_job(server_of_pods, {"merged": PLACE})
    check(store_in_pod(server_of_pods, job, submit(server_of_pods, job)))


def test_folder_marker_object_of_s3_consoles_is_not_listed(s3: S3Server) -> None:
    objects = ObjectStore(s3.address, VARIABLES)
    for key in ("many/", "many/a"):
        s3.client.put_object(Bucket="hanzo-models", Key=key, Body=b"")
    assert objects.entries(PLACE) == [ObjectEntry(f"{PLACE}/a", 0)]
    assert objects.list_folder(PLACE) == ([ObjectEntry(f"{PLACE}/a", 0)], [])
