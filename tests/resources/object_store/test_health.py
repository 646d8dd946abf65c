"""Object store health check: bounded in time, with the required action."""

import socket
from pathlib import Path

from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from resources.object_store.health import find_store_problem_in_time
from tests.support.recipes.http_responses import answering
from tests.support.s3_server import BUCKETS, VARIABLES, S3Server


def test_usable_store_has_no_problem(tmp_path: Path, s3: S3Server) -> None:
    assert find_store_problem_in_time(Store(s3.address, VARIABLES), 60) is None
    assert find_store_problem_in_time(Store(StoreAddress(root=tmp_path.as_uri(), buckets=BUCKETS)), 60) is None


def test_any_bucket_that_is_missing_is_named(s3: S3Server) -> None:
    for kind in BUCKETS:
        store = Store(s3.address.model_copy(update={"buckets": {**BUCKETS, kind: "nowhere"}}), VARIABLES)
        said = "has no bucket nowhere (settings storage.buckets, storage.endpoint)"
        assert find_store_problem_in_time(store, 60) == f"{s3.url} {said}"


def test_wrong_keys_are_reported_with_the_settings() -> None:
    with answering(403, "SignatureDoesNotMatch", "No.") as url:
        problem = find_store_problem_in_time(Store(StoreAddress(root=url, buckets=BUCKETS), VARIABLES), 60)
    assert problem and "SignatureDoesNotMatch: No. (settings storage.access_key, storage.secret_key)" in problem


def test_unresponsive_store_is_reported_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        problem = find_store_problem_in_time(Store(StoreAddress(root=url, buckets=BUCKETS), VARIABLES), 0.2)
    assert problem == f"{url} has not answered for 0 s (setting storage.endpoint)"
