"""Subscriptions of Dagster's UI over a websocket through the server."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from api.routes.ui.sign_in import COOKIE
from resources.jobs import job_tokens
from resources.metadata.database import Database
from tests.api.auth.iam import Iam
from tests.api.dagster_ui.conftest import ENGINE_TOKEN, Installation, signed_in_server
from tests.support.free_ports import free_port
from tests.support.signed_store import program_job, submit

SUBSCRIPTION = "subscription Logs($id: ID!) { pipelineRunLogs(runId: $id) { __typename } }"
MUTATION = 'mutation { terminateRun(runId: "1") { __typename } }'


def open_socket(
    installation: Installation, path: str = "/dagster/graphql", protocol: str = "graphql-ws", **headers: str
) -> ClientConnection:
    address = installation.server.url.replace("http", "ws", 1) + path
    return connect(address, subprotocols=[protocol], additional_headers=headers, proxy=None, compression=None)  # type: ignore[list-item]


def open_as(installation: Installation, role: str, organization: str = "acme", **claims: Any) -> ClientConnection:
    token = installation.token(role, organization, **claims)
    return open_socket(installation, Authorization=f"Bearer {token}")


def refused_status(installation: Installation, path: str = "/dagster/graphql", **headers: str) -> int:
    with pytest.raises(InvalidStatus) as refused:
        open_socket(installation, path, **headers)
    return refused.value.response.status_code


def send(socket: ClientConnection, **message: Any) -> None:
    socket.send(json.dumps(message))


def start(socket: ClientConnection, query: str, kind: str = "start", **payload: Any) -> None:
    send(socket, type=kind, id="7", payload={"query": query, **payload})


@pytest.mark.parametrize("role", ["viewer", "researcher", "admin"])
@pytest.mark.parametrize(("protocol", "kind"), [("graphql-ws", "start"), ("graphql-transport-ws", "subscribe")])
def test_subscription_messages_are_proxied_in_both_directions(
    installation: Installation, role: str, protocol: str, kind: str
) -> None:
    headers = {"Authorization": f"Bearer {installation.token(role)}"}
    with open_socket(installation, protocol=protocol, **headers) as socket:
        assert socket.subprotocol == protocol
        send(socket, type="connection_init", payload={"token": "secret of the page"})
        assert json.loads(socket.recv(timeout=10)) == {"type": "connection_ack"}
        start(socket, SUBSCRIPTION, kind, variables={"id": "1"}, operationName="Logs", extensions={"a": 1})
        assert json.loads(socket.recv(timeout=10))["payload"] == {"data": {"logs": 1}}
        received = installation.dagster.received[-1]
    assert received.messages[0] == {"type": "connection_init"}
    request = {"query": SUBSCRIPTION, "variables": {"id": "1"}, "operationName": "Logs", "operation_name": "Logs"}
    assert received.messages[1] == {"type": kind, "id": "7", "payload": request}
    assert not received.headers.keys() & {"authorization", "cookie", "origin", "user-agent"}
    deadline = time.monotonic() + 10
    while received.messages[-1] != "closed":
        assert time.monotonic() < deadline, "the connection to Dagster stays open"
        time.sleep(0.02)


@pytest.mark.parametrize("query", [MUTATION, f"{SUBSCRIPTION} {MUTATION}", f"query A {{ version }} {MUTATION}", "{", ""])
def test_mutation_over_a_websocket_is_refused_to_everybody(installation: Installation, query: str) -> None:
    with open_as(installation, "admin") as socket:
        start(socket, query, operationName="Logs")
        message = json.loads(socket.recv(timeout=10))
        assert (message["type"], message["id"]) == ("error", "7") and message["payload"]["message"]
        start(socket, SUBSCRIPTION)
        assert json.loads(socket.recv(timeout=10))["type"] == "data", "the connection goes on"
        assert [message["type"] for message in installation.dagster.received[-1].messages] == ["start"]


@pytest.mark.parametrize("message", ["no JSON", "[]", '{"type": "mutate"}', '{"type": "stop", "id": {"a": 1}}', "{}"])
def test_unknown_message_ends_the_connection(installation: Installation, message: str) -> None:
    with open_as(installation, "admin") as socket:
        socket.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=10)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    assert installation.dagster.received[-1].messages in ([], ["closed"])


def test_long_message_ends_the_connection(installation: Installation) -> None:
    with open_as(installation, "viewer") as socket:
        start(socket, SUBSCRIPTION, variables={"id": "x" * (1 << 20)})
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=10)


def test_connection_closed_by_dagster_closes_the_client_normally(installation: Installation) -> None:
    with open_as(installation, "viewer") as socket:
        send(socket, type="connection_terminate")
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=10)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000


def test_handshake_requires_a_users_token_and_the_graphql_path(installation: Installation) -> None:
    known = len(installation.dagster.received)
    assert refused_status(installation) == 401
    assert refused_status(installation, Authorization="Bearer nonsense") == 401
    assert refused_status(installation, Authorization=f"Bearer {installation.token('viewer', exp=1)}") == 401
    for path in ("/dagster/", "/dagster/graphql/", "/v1/jobs", "/dagster/../dagster/graphql"):
        token = installation.token("admin")
        assert refused_status(installation, path, Authorization=f"Bearer {token}") in (200, 400, 403, 404, 503), path
    assert all(received.method != "websocket" for received in installation.dagster.received[known:])


def test_tokens_of_jobs_pods_and_engine_are_refused(installation: Installation) -> None:
    with installation.client("admin") as admin:
        records = {"files": ("a.jsonl", b'{"instruction": "1+1", "answer": "2"}\n' * 4, "application/jsonl")}
        admin.post("/v1/datasets", data={"name": "tokens"}, files=records)
        job_id = admin.post("/v1/jobs", json={"name": "tokens", "dataset": "tokens"}).json()["id"]
    database = Database(installation.server.settings.database_url)
    with database.write() as connection:
        job_token = job_tokens.issue_token(connection, job_id, 60)
    database.close()
    program_token = submit(installation.server, program_job(installation.server, {"model": "s3://hanzo-models/m/made"}))
    for token, status in ((job_token, 403), (program_token, 401), (ENGINE_TOKEN, 403)):
        header = {"Authorization": f"Bearer {token}"}
        assert refused_status(installation, **header) == status
        with httpx.Client(base_url=installation.server.url, headers=header, trust_env=False) as client:
            assert client.get("/dagster/").status_code == status
            assert client.post("/dagster/graphql", json={"query": "{ version }"}).status_code == status


def test_only_pages_of_this_server_use_the_cookie(installation: Installation) -> None:
    cookie = {"Cookie": f"{COOKIE}={installation.token('viewer')}"}
    with open_socket(installation, **cookie, Origin=installation.server.url) as socket:
        assert socket.subprotocol == "graphql-ws"
    assert refused_status(installation, **cookie) == 401
    for origin in ("http://evil.example", "http://127.0.0.1:1", "null"):
        assert refused_status(installation, **cookie, Origin=origin) in (401, 403)
    site = {"Sec-Fetch-Site": "cross-site", "Origin": installation.server.url}
    assert refused_status(installation, **cookie, **site) in (401, 403)
    bearer = {"Authorization": f"Bearer {installation.token('viewer')}"}
    assert refused_status(installation, **bearer, Origin="http://127.0.0.1:1") == 403


def test_handshake_with_foreign_host_header_is_refused(installation: Installation) -> None:
    headers = {
        "Authorization": f"Bearer {installation.token('viewer')}",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Protocol": "graphql-ws",
        "Host": "evil.example",
    }
    answer = httpx.get(f"{installation.server.url}/dagster/graphql", headers=headers, trust_env=False)
    assert answer.status_code == 403


def test_refused_handshake_is_audited(installation: Installation) -> None:
    bearer = {"Authorization": f"Bearer {installation.token('viewer')}"}
    assert refused_status(installation, **bearer, Origin="http://evil.example:80") == 403
    assert refused_status(installation, **bearer, Origin="http://127.0.0.1:1") == 403
    deadline = time.monotonic() + 20
    while not any(call["method"] == "WEBSOCKET" and call["status"] == 403 for call in installation.audited()):
        assert time.monotonic() < deadline, "the audit log does not show it"
        time.sleep(0.2)


def test_other_subprotocols_are_refused(installation: Installation) -> None:
    headers = {"Authorization": f"Bearer {installation.token('viewer')}"}
    with pytest.raises(InvalidStatus) as refused:
        open_socket(installation, protocol="mqtt", **headers)
    assert refused.value.response.status_code == 400


def test_connection_ends_with_its_token(installation: Installation) -> None:
    with open_as(installation, "viewer", exp=int(time.time()) + 2) as socket, pytest.raises(ConnectionClosed) as closed:
        socket.recv(timeout=40)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, "expired" in closed.value.rcvd.reason) == (1008, True)


def test_expired_token_starts_no_subscription(installation: Installation) -> None:
    with open_as(installation, "viewer", exp=int(time.time()) + 2) as socket:
        time.sleep(2.5)
        start(socket, SUBSCRIPTION)
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=10)


def test_handshake_answers_503_when_dagster_is_down(tmp_path: Path) -> None:
    with Iam() as iam, signed_in_server(tmp_path, iam, f"http://127.0.0.1:{free_port()}") as server:
        installation = Installation(server, iam, None)  # type: ignore[arg-type]
        bearer = {"Authorization": f"Bearer {installation.token('viewer')}"}
        assert refused_status(installation, **bearer) == 503


def test_server_shutdown_closes_open_websockets(tmp_path: Path, installation: Installation) -> None:
    with signed_in_server(tmp_path, installation.iam, installation.dagster.url) as server:
        other = Installation(server, installation.iam, installation.dagster)
        with open_as(other, "viewer") as socket:
            begun = time.monotonic()
            server.stop()
            assert time.monotonic() - begun < 10
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=10)
