"""Multipart uploads and signed downloads: supported on S3, refused on a folder.

On S3 they run with MLflow's own client.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient

from tests.api.artifact_server import ArtifactServer
from tests.support.s3_server import S3Server
from tests.support.server_process import ServerProcess

MULTIPART = "/api/2.0/mlflow-artifacts"
MLFLOW = "/api/2.0/mlflow"
PART = 5 << 20
"""The smallest part that S3 accepts."""
LARGE = os.urandom(1 << 20) * 12 + b"the end"


@pytest.fixture(scope="module")
def server(server_on_s3: ServerProcess) -> ArtifactServer:
    return ArtifactServer(server_on_s3)


@pytest.fixture(scope="module")
def folder(server_on_folder: ServerProcess) -> ArtifactServer:
    return ArtifactServer(server_on_folder)


def asked(server: ArtifactServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def uploaded_parts(s3: S3Server) -> list[str]:
    return [request.query for request in s3.requests if request.method == "PUT" and "partNumber" in request.query]


@pytest.mark.slow
def test_mlflows_client_sends_a_large_file_in_parts(
    server: ArtifactServer, s3_session: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE", str(PART))
    monkeypatch.setenv("MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE", str(PART))
    client, run_id = MlflowClient(server.url), server.new_run()
    (tmp_path / "weights.bin").write_bytes(LARGE)
    s3_session.requests.clear()
    client.log_artifact(run_id, str(tmp_path / "weights.bin"), "model")
    assert len(uploaded_parts(s3_session)) == 3
    answer = server.raw("GET", server.place(run_id, "model/weights.bin"))
    assert answer.body == LARGE
    assert answer.headers["X-Checksum-Sha256"] == hashlib.sha256(LARGE).hexdigest()
    # It was hashed at upload: what changes afterwards is not served.
    server.store.put_bytes(f"s3://hanzo-ml/runs/{run_id}/artifacts/model/weights.bin", LARGE[:-1] + b"!")
    assert server.raw("GET", server.place(run_id, "model/weights.bin")).status == 409


def test_mlflows_client_downloads_over_a_signed_url(
    server: ArtifactServer, s3_session: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD", "true")
    monkeypatch.setenv("MLFLOW_MULTIPART_DOWNLOAD_CHUNK_SIZE", str(PART))
    client, run_id = MlflowClient(server.url), server.new_run()
    server.raw("PUT", server.place(run_id, "f.bin"), LARGE)
    s3_session.requests.clear()
    found = Path(client.download_artifacts(run_id, "f.bin", str(tmp_path)))
    assert found.read_bytes() == LARGE
    assert len([request for request in s3_session.requests if "X-Amz-Signature" in request.query]) == 3
    server.store.put_bytes(f"s3://hanzo-ml/runs/{run_id}/artifacts/f.bin", b"something else")
    assert httpx.get(f"{server.url}{MULTIPART}/presigned/0/{run_id}/artifacts/f.bin").status_code == 409


def begun(server: ArtifactServer, folder: str, name: str = "f.bin", parts: int = 1) -> dict[str, Any]:
    answer = asked(server, f"{MULTIPART}/mpu/create/{folder}", {"path": name, "num_parts": parts})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_presigned_url_of_a_published_file_serves_that_file(server: ArtifactServer) -> None:
    run_id = server.new_run()
    server.store.put_bytes(f"s3://hanzo-ml/runs/{run_id}/train.json", b"{}")
    answer = httpx.get(f"{server.url}{MULTIPART}/presigned/0/{run_id}/artifacts/train.json").json()
    assert httpx.get(answer["url"]).content == b"{}"


def test_completing_an_upload_with_wrong_parts_stores_nothing(server: ArtifactServer) -> None:
    run_id = server.new_run()
    folder = f"0/{run_id}/artifacts"
    server.raw("PUT", server.place(run_id, "f.bin"), b"old")
    upload = begun(server, folder, "/home/me/f.bin")
    httpx.put(upload["credentials"][0]["url"], content=b"new")
    body = {"path": "f.bin", "upload_id": upload["upload_id"], "parts": [{"part_number": 1, "etag": '"0"', "url": "x"}]}
    answer = asked(server, f"{MULTIPART}/mpu/complete/{folder}", body)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert server.raw("GET", server.place(run_id, "f.bin")).body == b"old"
    assert [asked(server, f"{MULTIPART}/mpu/abort/{folder}", body).status_code for _ in range(2)] == [200, 200]


def test_upload_id_is_valid_only_for_its_own_file(server: ArtifactServer) -> None:
    run_id, other = server.new_run(), server.new_run()
    upload = begun(server, f"0/{run_id}/artifacts")
    etag = httpx.put(upload["credentials"][0]["url"], content=b"new").headers["ETag"]
    body = {"path": "f.bin", "upload_id": upload["upload_id"], "parts": [{"part_number": 1, "etag": etag}]}
    assert asked(server, f"{MULTIPART}/mpu/complete/0/{other}/artifacts", body).status_code == 404
    assert asked(server, f"{MULTIPART}/mpu/complete/0/{run_id}/artifacts", body).status_code == 200
    assert server.raw("GET", server.place(run_id, "f.bin")).body == b"new"
    assert server.files(other) == []


def test_upload_completion_can_be_retried(server: ArtifactServer) -> None:
    run_id = server.new_run()
    folder, where = f"0/{run_id}/artifacts", server.place(run_id, "f.bin")
    upload = begun(server, folder)
    etag = httpx.put(upload["credentials"][0]["url"], content=b"new").headers["ETag"]
    body = {"path": "f.bin", "upload_id": upload["upload_id"], "parts": [{"part_number": 1, "etag": etag}]}
    complete, abort = f"{MULTIPART}/mpu/complete/{folder}", f"{MULTIPART}/mpu/abort/{folder}"
    answers = [asked(server, address, body) for address in (complete, complete, abort, complete)]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(200, {})] * 4
    assert server.raw("GET", where).body == b"new"
    server.store.put_bytes(f"s3://hanzo-ml/runs/{run_id}/artifacts/f.bin", b"odd")
    assert server.raw("GET", where).status == 409, "asking again leaves no record that would let other bytes pass"
    server.raw("PUT", where, b"another")
    assert asked(server, complete, body).status_code == 404, "what lies there is not this upload's"


def test_missing_hash_after_a_server_crash_is_recorded_by_the_first_read(
    server: ArtifactServer, s3_session: S3Server
) -> None:
    run_id = server.new_run()
    where, key = server.place(run_id, "f.bin"), f"runs/{run_id}/artifacts/f.bin"
    server.raw("PUT", where, b"old")
    upload = begun(server, f"0/{run_id}/artifacts")
    etag = httpx.put(upload["credentials"][0]["url"], content=b"new").headers["ETag"]
    # The state that `adopt` leaves when the server dies after the parts were joined.
    server.records.begin_upload(f"s3://hanzo-ml/{key}", "", 0)
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    bucket = server.process.settings.storage.buckets.checkpoints
    s3_session.client.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload["upload_id"], MultipartUpload=parts)
    assert server.raw("GET", where).body == b"new"
    server.store.put_bytes(f"s3://hanzo-ml/{key}", b"odd")
    assert server.raw("GET", where).status == 409


def test_multipart_upload_to_a_deleted_run_is_refused(server: ArtifactServer) -> None:
    run_id = server.new_run()
    asked(server, f"{MLFLOW}/runs/delete", {"run_id": run_id})
    answer = asked(server, f"{MULTIPART}/mpu/create/0/{run_id}/artifacts", {"path": "f"})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


def test_server_info_reports_supported_multipart_features(server: ArtifactServer, folder: ArtifactServer) -> None:
    for asked_server, uploads in ((server, True), (folder, False)):
        info = httpx.get(f"{asked_server.url}/api/3.0/mlflow/server-info").json()
        assert info["multipart_uploads_enabled"] is uploads
        assert info["multipart_downloads_enabled"] is False
        assert info["features_enabled"] == {"gateway": False}


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("POST", "mpu/create/free", "Multipart upload"),
        ("POST", "mpu/complete/free", "Multipart upload"),
        ("POST", "mpu/abort/free", "Multipart upload"),
        ("GET", "presigned/free/f", "Multipart download"),
    ],
)
def test_presigned_urls_on_a_folder_store_answer_501(folder: ArtifactServer, method: str, path: str, what: str) -> None:
    body = {"path": "f", "num_parts": 2, "upload_id": "u", "parts": [{"part_number": 1, "etag": "e"}]}
    sent = json.dumps(body) if method == "POST" else b""
    answer = folder.raw(method, f"{MULTIPART}/{path}", sent, {"Content-Type": "application/json"})
    assert answer.status == 501
    assert json.loads(answer.body) == {
        "error_code": "NOT_IMPLEMENTED",
        "message": f"{what} is not supported for the current artifact repository",
    }


@pytest.mark.parametrize("kind", ["upload", "download"])
def test_presigned_url_of_a_run_is_refused_for_proxied_artifacts(server: ArtifactServer, kind: str) -> None:
    run_id, address = server.new_run(), f"{MLFLOW}/artifacts/presigned-{kind}-url"
    for body, status, message in (
        ({"run_id": run_id, "path": "f"}, 400, f"Presigned {kind} is not supported for"),
        ({"run_id": run_id}, 400, "Missing value for required parameter 'path'"),
        ({"run_id": run_id, "path": "../f"}, 400, "Invalid path"),
        ({"run_id": "f" * 32, "path": "f"}, 404, "not found"),
        ({"run_id": run_id, "path": "f", "expiration": "soon"}, 400, "for parameter 'expiration'"),
    ):
        answer = asked(server, address, body)
        assert (answer.status_code, message in answer.json()["message"]) == (status, True), answer.text
