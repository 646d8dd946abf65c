"""Dagster's pages and GraphQL through the server: permissions, and what reaches Dagster."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.auth.iam import Iam
from tests.api.dagster_ui.conftest import Installation, signed_in_server
from tests.support.free_ports import free_port
from tests.support.server_process import ServerProcess

LAUNCH = "mutation L($p: ExecutionParams!) { launchPipelineExecution(executionParams: $p) { ... on X { run { id } } } }"
TERMINATE = 'mutation { terminateRun(runId: "run-1") { __typename } }'
SELECTION = {"p": {"selector": {"assetSelection": [{"path": ["models", "a", "checkpoint"]}]}}}
PERSON = {"Accept": "text/html,application/xhtml+xml"}
GRAPHQL = "/dagster/graphql"


def ask(client: httpx.Client, query: str, **more: Any) -> httpx.Response:
    return client.post(GRAPHQL, json={"query": query, **more})


def test_pages_and_files_require_sign_in(installation: Installation) -> None:
    assert installation.reached_dagster(lambda: httpx.get(f"{installation.server.url}/dagster/", trust_env=False)) == []
    shown = httpx.get(f"{installation.server.url}/dagster/runs", headers=PERSON, trust_env=False)
    assert shown.status_code == 401 and "Sign in" in shown.text
    for role in ("viewer", "researcher", "admin"):
        for client in (installation.client(role), installation.page(role)):
            answer = client.get("/dagster/assets/a b?view=1")
            assert (answer.status_code, answer.text) == (200, "<html>Dagster</html>")
            assert answer.headers["x-frame-options"] == "SAMEORIGIN" and answer.headers["etag"] == "1"
            assert "set-cookie" not in answer.headers
    assert installation.dagster.received[-1].path == "/dagster/assets/a b"
    assert installation.dagster.received[-1].query == "view=1"
    assert installation.client("viewer").get("/dagster").headers["location"] == "/dagster/"
    assert installation.client("viewer").get("/dagster/redirect").headers["location"] == "/dagster/assets"


def test_dagster_sees_neither_credentials_nor_the_connection(installation: Installation) -> None:
    page = installation.page("researcher")
    page.headers.update(
        {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "X-Forwarded-For": "1.2.3.4", "If-None-Match": "7"}
    )
    bearer = installation.client("researcher")
    for client in (page, bearer):
        for received in installation.reached_dagster(
            lambda client=client: (
                client.get("/dagster/x"),
                ask(client, "{ version }"),
                ask(client, LAUNCH, variables=SELECTION),
            )
        ):
            sent = {"accept", "accept-encoding", "host", "connection", "content-length", "content-type", "if-none-match"}
            assert received.headers.keys() <= sent
            assert received.headers.get("connection", "close") in ("close", "keep-alive")
    [received] = installation.reached_dagster(lambda: page.get("/dagster/x"))
    assert received.headers["if-none-match"] == "7"


def test_graphql_mutations_require_the_role_that_permits_them(installation: Installation) -> None:
    viewer, researcher, admin = map(installation.client, ("viewer", "researcher", "admin"))
    for client in (viewer, researcher, admin):
        assert ask(client, "{ version }").json() == {"data": {"version": "1.13"}}
    for query, variables in ((LAUNCH, SELECTION), ("mutation { reloadWorkspace { __typename } }", {})):
        known = len(installation.dagster.received)
        refused = ask(viewer, query, variables=variables)
        assert refused.status_code == 403 and len(installation.dagster.received) == known
        [error] = refused.json()["data"].values()
        assert (error["__typename"], error["message"]) == ("PythonError", refused.json()["message"])
        assert "Your role (ml-viewer) does not include" in refused.json()["message"]
    assert ask(researcher, LAUNCH, variables=SELECTION).status_code == 200
    assert ask(researcher, "mutation { reloadWorkspace { __typename } }").status_code == 403
    assert ask(admin, "mutation { reloadWorkspace { __typename } }").status_code == 200


def test_researcher_does_not_end_another_users_job(installation: Installation) -> None:
    researcher, admin = installation.client("researcher"), installation.client("admin")
    records = {"files": ("a.jsonl", b'{"instruction": "1+1", "answer": "2"}\n' * 4, "application/jsonl")}
    assert admin.post("/v1/datasets", data={"name": "corpus"}, files=records).status_code == 201
    own, others = (
        client.post("/v1/jobs", json={"name": "a", "dataset": "corpus"}).json()["id"] for client in (researcher, admin)
    )
    for job_id, status in ((own, 200), (others, 403), ("launched in the UI", 200)):
        tags = [{"key": "dagster/partition", "value": job_id}]
        installation.dagster.runs = [{"runId": "run-1", "tags": tags, "assetSelection": None}]
        assert ask(researcher, TERMINATE).status_code == status, job_id
        assert ask(admin, TERMINATE).status_code == 200


def test_mutations_are_audited_with_name_and_run(installation: Installation) -> None:
    installation.dagster.answer = {
        "data": {"launchPipelineExecution": {"__typename": "LaunchRunSuccess", "run": {"id": "run-7"}}}
    }
    ask(installation.client("researcher"), LAUNCH, variables=SELECTION)
    ask(installation.client("admin"), 'mutation { deleteRun(runId: "run-8") { __typename } }')
    ask(installation.client("viewer"), TERMINATE)
    ask(installation.client("viewer"), "{ version }")
    found = [(call["user"], call["objects"], call["status"]) for call in installation.audited() if call["route"] == GRAPHQL]
    installation.dagster.answer = {"data": {"version": "1.13"}}
    assert found[-3:] == [
        ("researcher@acme", ["mutation:launchPipelineExecution", "dagster run:run-7"], 200),
        ("admin@acme", ["mutation:deleteRun", "dagster run:run-8", "dagster run:run-7"], 200),
        ("viewer@acme", ["mutation:terminateRun", "dagster run:run-1"], 403),
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"User-Agent": "without either header"},
    ],
)
def test_another_site_cannot_use_the_cookie(installation: Installation, headers: dict[str, str]) -> None:
    answers: list[int] = []
    with installation.page("admin", **headers) as page:
        sent = installation.reached_dagster(
            lambda: answers.extend(ask(page, query).status_code for query in ("{ version }", TERMINATE))
        )
    assert sent == [] and set(answers) <= {401, 403}


def test_page_of_this_server_uses_the_cookie(installation: Installation) -> None:
    for headers in ({"Origin": installation.server.url}, {"Sec-Fetch-Site": "same-origin"}):
        with installation.page("researcher", **headers) as page:
            assert ask(page, LAUNCH, variables=SELECTION).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/graphql", "application/x-www-form-urlencoded", ""])
def test_graphql_post_with_form_content_type_is_refused(installation: Installation, content_type: str) -> None:
    body = json.dumps({"query": "mutation { reloadWorkspace { __typename } }"})
    client = installation.client("admin")
    send = {"content": body, "headers": {"Content-Type": content_type}}
    assert installation.reached_dagster(lambda: client.post(f"{GRAPHQL}?query=mutation{{x}}", **send)) == []


def test_request_with_two_documents_reaches_dagster_with_the_validated_one(installation: Installation) -> None:
    viewer = installation.client("viewer")
    body = '{"query": "mutation { deleteRun }", "query": "{ version }"}'
    sent = installation.reached_dagster(
        lambda: viewer.post(f"{GRAPHQL}?query=mutation{{x}}", content=body, headers={"Content-Type": "application/json"})
    )
    assert [(received.json["query"], received.query) for received in sent] == [("{ version }", "")]


def test_graphql_get_request_only_reads(installation: Installation) -> None:
    admin = installation.client("admin")
    [received] = installation.reached_dagster(lambda: admin.get(GRAPHQL, params={"query": "{ version }", "other": "1"}))
    assert received.query == "query=%7B+version+%7D" or "version" in received.query
    assert "other" not in received.query
    for refused in (
        {"query": "mutation { reloadWorkspace { __typename } }"},
        [("query", "{ version }"), ("query", "mutation { reloadWorkspace { __typename } }")],
        {"query": ""},
    ):
        assert installation.reached_dagster(lambda given=refused: admin.get(GRAPHQL, params=given)) == []
    [page] = installation.reached_dagster(lambda: admin.get(f"{GRAPHQL}?query=mutation{{x}}", headers=PERSON))
    assert page.query == "", "the page to write queries in is a file"


def test_reporting_asset_events_requires_admin(installation: Installation) -> None:
    path = "/dagster/report_asset_materialization/models/a/version"
    for role in ("viewer", "researcher"):
        client = installation.client(role)
        assert installation.reached_dagster(lambda client=client: client.post(path)) == []
    admin = installation.client("admin")
    [received] = installation.reached_dagster(lambda: admin.post(f"{path}?partition=1", json={"description": "by hand"}))
    assert (received.path, received.query, received.json) == (path, "partition=1", {"description": "by hand"})
    assert installation.audited()[-1]["objects"] == ["asset event:report_asset_materialization/models/a/version"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/dagster/"),
        ("POST", "/dagster/runs"),
        ("POST", "/dagster/graphql/"),
        ("POST", "/dagster//graphql"),
        ("POST", "/dagster/report_asset_materialization/"),
        ("POST", "/dagster/report_asset_check/%2e%2e/%2e%2e/graphql"),
        ("PUT", "/dagster/graphql"),
        ("DELETE", "/dagster/runs"),
        ("GET", "/dagster/notebook?path=/etc/x.ipynb"),
        ("GET", "/dagster/dagit/notebook"),
        ("GET", "/dagster/%2e%2e/server_info"),
        ("GET", "/dagster/a%5c..%5cb"),
        ("GET", "/dagster/a%00b"),
    ],
)
def test_other_paths_do_not_reach_dagster(installation: Installation, method: str, path: str) -> None:
    client, statuses = installation.client("admin"), []
    sent = installation.reached_dagster(lambda: statuses.append(client.request(method, path).status_code))
    assert sent == [] and statuses[0] in (400, 403, 404, 405)


def test_bodies_are_limited(installation: Installation) -> None:
    long = {"query": "{ version }", "variables": {"a": "x" * (1 << 20)}}
    client = installation.client("admin")
    assert installation.reached_dagster(lambda: client.post(GRAPHQL, json=long)) == []
    chunks = (b'"' + b"x" * 100_000 for _ in range(12))
    assert client.post(GRAPHQL, content=chunks, headers={"Content-Type": "application/json"}).status_code in (400, 413)


def test_log_stream_is_cancelled_when_the_client_disconnects(installation: Installation) -> None:
    with installation.client("viewer").stream("GET", "/dagster/logs/endless") as answer:
        chunks = answer.iter_bytes()
        assert b"line" in next(chunks) and b"line" in next(chunks)
    deadline = time.monotonic() + 30
    while not installation.dagster.cancelled_streams:
        assert time.monotonic() < deadline, "the server still reads what nobody wants"
        time.sleep(0.05)


@pytest.mark.requirement("W5")
def test_only_admins_of_the_admin_organization_reach_dagster_with_several_organizations(tmp_path: Path) -> None:
    with Iam() as iam:
        extra = {"HANZO_ML_DAGSTER_ADMIN_ORGANIZATION": "platform"}
        with signed_in_server(tmp_path, iam, f"http://127.0.0.1:{free_port()}", **extra) as server:
            installation = Installation(server, iam, None)  # type: ignore[arg-type]
            assert installation.client("viewer").get("/dagster/").status_code == 503
            for organization in ("acme", "rival"):
                made = installation.client("researcher", organization).post("/v1/experiments", json={"name": "theirs"})
                assert made.status_code == 201
            time.sleep(5.1)  # lookups are cached for 5 s
            for organization in ("acme", "rival"):
                for role in ("viewer", "researcher", "admin"):
                    client = installation.client(role, organization)
                    for answer in (client.get("/dagster/"), ask(client, "{ version }")):
                        assert answer.status_code == 403 and "dagster.admin_organization" in answer.json()["message"]
            assert installation.client("admin", "platform").get("/dagster/").status_code == 503
            assert installation.client("researcher", "platform").get("/dagster/").status_code == 403


def test_multi_organization_installation_is_closed_before_a_second_organization_exists(tmp_path: Path) -> None:
    with Iam() as iam:
        extra = {"HANZO_ML_SCHEDULER_NAMESPACE_PER_ORGANIZATION": "true"}
        with signed_in_server(tmp_path, iam, f"http://127.0.0.1:{free_port()}", **extra) as server:
            installation = Installation(server, iam, None)  # type: ignore[arg-type]
            for role in ("viewer", "researcher", "admin"):
                assert installation.client(role).get("/dagster/").status_code == 403
            assert installation.client("researcher", "default").get("/dagster/").status_code == 403
            assert installation.client("admin", "default").get("/dagster/").status_code == 503


def test_page_explains_how_to_start_dagster_when_it_is_down(tmp_path: Path) -> None:
    with Iam() as iam, signed_in_server(tmp_path, iam, f"http://127.0.0.1:{free_port()}") as server:
        installation = Installation(server, iam, None)  # type: ignore[arg-type]
        viewer = installation.client("viewer")
        page = viewer.get("/dagster/runs", headers=PERSON)
        assert page.status_code == 503 and "dagster-webserver" in page.text and "<h1>" in page.text
        assert viewer.get("/dagster/runs").json()["error_code"] == "TEMPORARILY_UNAVAILABLE"
        assert "dagster-webserver" in ask(viewer, "{ version }").json()["errors"][0]["message"]
        failed = ask(installation.client("admin"), 'mutation { deleteRun(runId: "1") { __typename } }')
        assert failed.status_code == 503
        assert viewer.get("/v1/addresses").json()["dagster"] == f"{server.url}/dagster"


def test_local_server_redirects_to_dagsters_own_port(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        answer = http.get("/dagster/runs")
        assert (answer.status_code, answer.headers["location"]) == (307, "http://127.0.0.1:3000/runs")
        assert http.get("/v1/addresses").json()["dagster"] == "http://127.0.0.1:3000"
        assert http.post(GRAPHQL, json={"query": "{ version }"}).status_code == 404


def test_refusal_has_the_shape_of_the_requested_graphql_data(installation: Installation) -> None:
    viewer = installation.client("viewer")
    aliased = ask(viewer, 'mutation { again: terminateRun(runId: "1") { __typename } }').json()
    assert aliased["data"]["again"]["message"] == aliased["message"] and "errors" not in aliased
    scalar = ask(viewer, "mutation { setNuxSeen }").json()
    assert (scalar["data"], scalar["errors"][0]["message"]) == (None, scalar["message"])
    unreadable = ask(viewer, "mutation {").json()
    assert (unreadable["data"], unreadable["error_code"]) == (None, "INVALID_PARAMETER_VALUE")
