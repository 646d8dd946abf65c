"""The artifact proxy: files arrive complete, and no name escapes the run's folder."""

import http.client
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import ServerProcess

PROXY = "/api/2.0/mlflow-artifacts/artifacts"
LIST = "/api/2.0/mlflow/artifacts/list"

CLIMBS = [
    "../../../secret.txt",
    "..%2f..%2f..%2fsecret.txt",
    "%2e%2e/%2e%2e/%2e%2e/secret.txt",
    "%252e%252e/%252e%252e/secret.txt",
    "%2fetc/passwd",
    "//etc/passwd",
    "..%5c..%5csecret.txt",
    "a%00b",
    "x%23/../../secret.txt",
    "./x",
    "a/../../b",
    "a%0ab",
    "a%3fb",
    "%ff",
    "n" * 256,
]


@pytest.fixture
def run_id(server: ServerProcess) -> str:
    answer = httpx.post(f"{server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"})
    return str(answer.json()["run"]["info"]["run_id"])


def raw(server: ServerProcess, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request whose path is not normalized: other clients clean it up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("climb", CLIMBS)
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_path_traversal_never_leaves_the_run_folder(server: ServerProcess, run_id: str, method: str, climb: str) -> None:
    (server.home / "secret.txt").write_text("secret")
    (server.home / "objects" / "secret.txt").write_text("secret")
    before = files_below(server.home / "objects")
    status, answer = raw(server, method, f"{PROXY}/0/{run_id}/artifacts/{climb}", b"attack" if method == "PUT" else b"")
    assert status in (400, 404), answer
    assert b"secret" not in answer.replace(climb.encode(), b"")
    assert files_below(server.home / "objects") == before
    assert (server.home / "secret.txt").read_text() == "secret"


@pytest.mark.parametrize("climb", ["../..", "/etc", "%2e%2e", "a\\b", "x#y", "./..", "a//b"])
def test_listing_with_path_traversal_is_refused(server: ServerProcess, run_id: str, climb: str) -> None:
    for path, query in ((LIST, {"run_id": run_id, "path": climb}), (PROXY, {"path": f"0/{run_id}/artifacts/{climb}"})):
        assert httpx.get(server.url + path, params=query).status_code == 400


def test_upload_outside_a_runs_artifact_folder_is_not_found(server: ServerProcess, run_id: str) -> None:
    for place in (f"1/{run_id}/artifacts/f", "0/nobody/artifacts/f", f"0/{run_id}/checkpoints/f", "0", "0/x", "models/f"):
        status, _ = raw(server, "PUT", f"{PROXY}/{place}", b"x")
        assert status == 404, place


def test_file_arrives_complete_and_is_served_as_sandboxed_attachment(server: ServerProcess, run_id: str) -> None:
    body = bytes(range(256)) * 20_000
    where = f"{server.url}{PROXY}/0/{run_id}/artifacts/page/evil.html"
    assert httpx.put(where, content=body).json() == {}
    answer = httpx.get(where)
    assert answer.content == body
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]
    assert (server.home / "objects/hanzo-ml-checkpoints/runs" / run_id / "artifacts/page/evil.html").read_bytes() == body
    assert not files_below(server.home / "uploads")


def test_a_broken_off_upload_leaves_nothing(server: ServerProcess, run_id: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.putrequest("PUT", f"{PROXY}/0/{run_id}/artifacts/half.bin")
    connection.putheader("Content-Length", "1000000")
    connection.endheaders()
    connection.send(b"x" * 1000)
    connection.close()
    assert httpx.get(f"{server.url}{LIST}", params={"run_id": run_id}).json()["files"] == []


def test_path_cannot_be_both_file_and_folder(server: ServerProcess, run_id: str) -> None:
    assert raw(server, "PUT", f"{PROXY}/0/{run_id}/artifacts/a/b", b"x")[0] == 200
    assert raw(server, "PUT", f"{PROXY}/0/{run_id}/artifacts/a/b/c", b"x")[0] == 400
    assert raw(server, "PUT", f"{PROXY}/0/{run_id}/artifacts/a", b"x")[0] == 400
    assert raw(server, "GET", f"{PROXY}/0/{run_id}/artifacts/a/b/c")[0] == 404


def test_downloading_a_folder_answers_400(server: ServerProcess, run_id: str) -> None:
    """MLflow's message and status: a 404 would say that nothing is there."""
    assert raw(server, "PUT", f"{PROXY}/0/{run_id}/artifacts/a/b", b"x")[0] == 200
    for path in (f"{PROXY}/0/{run_id}/artifacts/a", f"/get-artifact?run_id={run_id}&path=a"):
        status, text = raw(server, "GET", path)
        assert status == 400 and b"Artifact path refers to a directory, not a file: 'a'" in text


def test_files_are_listed_and_deleted(server: ServerProcess, run_id: str) -> None:
    for name in ("d/one.txt", "d/two.txt", "three.txt"):
        raw(server, "PUT", f"{PROXY}/0/{run_id}/artifacts/{name}", b"123")

    def listed(path: str = "") -> object:
        return httpx.get(f"{server.url}{LIST}", params={"run_id": run_id, "path": path}).json()["files"]

    assert listed() == [{"path": "d", "is_dir": True}, {"path": "three.txt", "is_dir": False, "file_size": 3}]
    assert raw(server, "DELETE", f"{PROXY}/0/{run_id}/artifacts/d/one.txt")[0] == 200
    assert listed("d") == [{"path": "d/two.txt", "is_dir": False, "file_size": 3}]
    assert raw(server, "DELETE", f"{PROXY}/0/{run_id}/artifacts/d")[0] == 200
    assert listed("d") == []
    assert raw(server, "DELETE", f"{PROXY}/0/{run_id}/artifacts/d") == (200, b"{}")
    # All artifacts of one run, as `delete_artifacts()` of MLflow's client requests; never those of all runs.
    for everything in (PROXY, f"{PROXY}/", f"{PROXY}//", f"{PROXY}/./"):
        assert raw(server, "DELETE", everything)[0] >= 400
    assert listed() == [{"path": "three.txt", "is_dir": False, "file_size": 3}]
    assert raw(server, "DELETE", f"{PROXY}/0/{run_id}/artifacts/")[0] == 200
    assert listed() == []


def test_upload_to_a_deleted_run_is_refused(server: ServerProcess, run_id: str) -> None:
    httpx.post(f"{server.url}/api/2.0/mlflow/runs/delete", json={"run_id": run_id})
    assert raw(server, "PUT", f"{PROXY}/0/{run_id}/artifacts/a", b"x")[0] == 400
