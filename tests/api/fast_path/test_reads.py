"""Fast path of read calls: responses equal the regular path's, byte for byte."""

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.auth.permissions import LOCAL
from api.auth.route_matching import fast_calls
from api.fast_path.middleware import FastPathResources
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.tracking.run_inputs import Dataset, DatasetInput
from resources.metadata.tracking.tracking import Tracking
from resources.metadata.writes.group_commit import RunWriter
from resources.settings.settings import Settings
from tests.api.conftest import answering
from tests.support.postgres_server import PostgresServer, migrated_sqlite, postgres

__all__ = ["migrated_sqlite", "postgres"]

MLFLOW = "/api/2.0/mlflow"
COMFORTABLE = {"Content-Type": "Application/json"}
"""An equivalent spelling; only the one that all clients use takes the fast path."""

odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, "", "5", "5.5", 1, 0, -1, 5.0, 50_000, 50_001, 2**64, [], {}, "ü", "a\x00", ["x"], [1]]
)
orders = st.sampled_from(
    ["metrics.m DESC", "params.p", "tags.`t`", "status", "start_time ASC", "end_time DESC", "run_id", "nothing", "metrics."]
)
filters = st.sampled_from(
    [
        "params.p = 'v1' and metrics.m > 0.5",
        "metrics.m != 1",
        "tags.t LIKE '%é%'",
        "params.p ILIKE 'V_'",
        "params.p IS NULL",
        "params.p IS NOT NULL and tags.t != 'x'",
        "params.p = '" + "long" * 100 + "'",
        "params.p = '" + "long" * 99 + "'",
        "status IN ('RUNNING', 'FAILED')",
        "run_id IN ('a', 'b', 'c')",
        "run_name LIKE 'name %' and start_time > 2",
        "datasets.name = 'd'",
        "metrics.m > 'text'",
        "not a filter",
    ]
)
run_searches = st.fixed_dictionaries(
    {"experiment_ids": st.sampled_from([["0"], ["0", "1"], ["1"], [], ["x"]]) | odd},
    optional={
        "filter": filters | odd,
        "order_by": st.lists(orders, max_size=3) | odd,
        "max_results": st.sampled_from([1, 2, 1000]) | odd,
        "run_view_type": st.sampled_from(["ALL", "DELETED_ONLY", "ACTIVE_ONLY", 3]) | odd,
        "page_token": odd,
        "extra": odd,
    },
)
experiment_searches = st.fixed_dictionaries(
    {},
    optional={
        "filter": st.sampled_from(["name LIKE 'De%'", "tags.k = 'v'", "nothing"]) | odd,
        "order_by": st.lists(st.sampled_from(["name", "experiment_id DESC", "tags.k"]), max_size=2) | odd,
        "max_results": st.sampled_from([1, 1000]) | odd,
        "view_type": st.sampled_from(["ALL", 2]) | odd,
        "page_token": odd,
    },
)
ids = st.sampled_from(["a", "r0", "r1", "unknown", "", "%00", "ü"])
queries = st.one_of(
    st.tuples(st.just("runs/get"), st.fixed_dictionaries({}, optional={"run_id": ids, "run_uuid": ids, "x": ids})),
    st.tuples(
        st.just("experiments/get"),
        st.fixed_dictionaries({}, optional={"experiment_id": st.sampled_from(["0", "7", "", "x", "9" * 30])}),
    ),
    st.tuples(
        st.just("experiments/get-by-name"),
        st.fixed_dictionaries({}, optional={"experiment_name": st.sampled_from(["Default", "é & +", "none", ""])}),
    ),
    st.tuples(
        st.just("metrics/get-history"),
        st.fixed_dictionaries(
            {"run_id": ids},
            optional={
                "metric_key": st.sampled_from(["m", "none", "", "\x00"]),
                "max_results": st.sampled_from(["1", "0", "25000", "25001", "x", "٣", "9" * 40]),
                "page_token": st.sampled_from(["", "x"]),
            },
        ),
    ),
)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def http(
    request: pytest.FixtureRequest, migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    """Share one application among all tests of each database: they only read."""
    home = tmp_path_factory.mktemp("home")
    if request.param == "sqlite":
        url = f"sqlite:///{shutil.copy(migrated_sqlite, home / 'test.db')}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.url(server.create())
    database = Database(url)
    fill(Tracking(database))
    database.close()
    with answering(Settings.load({"HANZO_ML_HOME": str(home), "HANZO_ML_DATABASE_URL": url})) as client:
        yield client


def fill(tracking: Tracking) -> None:
    """Create runs that the filters and orders distinguish, in two experiments."""
    tracking.experiments.ensure_default()
    tracking.experiments.create("é & +", "default", tags={"k": "v", "é": '\n"'})
    for number in range(8):
        run = f"r{number}"
        tracking.runs.create(number % 2, run_id=run, name=f"name {number}", start_time=number // 2, user_id="u")
        value = float("nan") if number == 3 else number / 3
        params = [("p", f"v{number % 3}"), ("long", "long" * 100)] if number else []
        tracking.run_data.log_batch(run, [metric_point("m", value, step, step) for step in range(number)], params)
        tracking.run_data.log_batch(run, tags=[("t", 'é"\\' * (number % 3))])
    tracking.inputs.log("r1", [DatasetInput(Dataset("d", "1", "local", "{}"), {"mlflow.data.context": "train"})])
    tracking.runs.delete("r6")


def check_both_ways(http: TestClient, method: str, path: str, **said: Any) -> None:
    short, comfortable = (
        http.request(method, f"{MLFLOW}/{path}", headers=headers, **said)
        for headers in ({"Content-Type": "application/json"}, COMFORTABLE)
    )
    assert (short.status_code, short.content) == (comfortable.status_code, comfortable.content)
    assert short.headers["content-type"] == comfortable.headers["content-type"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=run_searches)
def test_run_search_is_equal_on_both_paths(http: TestClient, body: dict[str, Any]) -> None:
    check_both_ways(http, "POST", "runs/search", json=body)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=experiment_searches)
def test_experiment_search_is_equal_on_both_paths(http: TestClient, body: dict[str, Any]) -> None:
    check_both_ways(http, "POST", "experiments/search", json=body)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=queries)
def test_get_requests_are_answered_equally_on_both_paths(http: TestClient, asked: tuple[str, dict[str, str]]) -> None:
    """A GET that may have a body takes the regular path."""
    path, query = asked
    text = urlencode(query, quote_via=quote)
    short = http.get(f"{MLFLOW}/{path}?{text}")
    comfortable = http.get(f"{MLFLOW}/{path}?{text}", headers={"Content-Length": "1"})
    assert (short.status_code, short.content) == (comfortable.status_code, comfortable.content)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"max_results": NaN}', b"\xff", b'"x"', b"[" * 9999])
def test_malformed_body_is_refused_equally_on_both_paths(http: TestClient, text: bytes) -> None:
    check_both_ways(http, "POST", "runs/search", content=text)


def test_pagination_is_equal_on_both_paths(http: TestClient) -> None:
    body: dict[str, Any] = {"experiment_ids": ["0", "1"], "max_results": 2, "order_by": ["metrics.m DESC"]}
    seen: list[str] = []
    while True:
        check_both_ways(http, "POST", "runs/search", json=body)
        page = http.post(f"{MLFLOW}/runs/search", json=body).json()
        seen += [run["info"]["run_id"] for run in page["runs"]]
        if "next_page_token" not in page:
            break
        body["page_token"] = page["next_page_token"]
    assert sorted(seen) == ["r0", "r1", "r2", "r3", "r4", "r5", "r7"]


async def no_route(*_: Any) -> None:
    raise AssertionError("the route was called")


def fast_response(http: TestClient, method: str, path: str, query: str = "", body: bytes = b"") -> Any:
    """Return the response of a route's fast path; falling back to the regular path fails."""

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    with ThreadPoolExecutor(1) as threads:
        app: Any = http.app
        resources = FastPathResources(app.state.tracking, RunWriter(app.state.database), threads)
        call = fast_calls(app, resources)[method, f"{MLFLOW}/{path}"]
        headers = [(b"content-type", b"application/json")] if body else []
        scope = {"headers": headers, "query_string": query.encode(), "state": {"caller": LOCAL}}
        return asyncio.run(call(scope, receive, no_route))


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("runs/get", "run_id=r1&run_uuid=r1"),
        ("experiments/get", "experiment_id=0"),
        ("experiments/get-by-name", "experiment_name=Default"),
        ("metrics/get-history", "run_id=r5&metric_key=m&max_results=2&page_token="),
    ],
)
def test_common_get_request_takes_the_fast_path(http: TestClient, path: str, query: str) -> None:
    response = fast_response(http, "GET", path, query)
    assert response is not no_route and response.status_code == 200


@pytest.mark.parametrize("path", ["runs/search", "experiments/search"])
def test_common_search_takes_the_fast_path(http: TestClient, path: str) -> None:
    response = fast_response(http, "POST", path, body=b'{"experiment_ids": ["0"], "max_results": 5}')
    assert response is not no_route and response.status_code == 200


def test_search_with_more_conditions_than_sqlite_joins_is_equal_on_both_paths(http: TestClient) -> None:
    """More tables than SQLite joins."""
    text = " and ".join(f"params.none{number} != 'x'" for number in range(66))
    orders = [f"metrics.m{number}" for number in range(20)]
    for filter in ("", text):
        body = {"experiment_ids": ["0"], "filter": filter, "order_by": orders}
        check_both_ways(http, "POST", "runs/search", json=body)
        assert http.post(f"{MLFLOW}/runs/search", json=body).status_code == 200
