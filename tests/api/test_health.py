"""Health, and the servers that refuse to start."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import uvicorn
from fastapi.testclient import TestClient
from prometheus_client import generate_latest

from api import server
from api.app import create_app
from api.health import Probe
from resources.settings.settings import Settings
from tests.api.artifact_server import on_s3
from tests.api.conftest import answering, migrated
from tests.support.postgres_server import NoPostgres, PostgresServer
from tests.support.s3_server import BUCKETS, S3Server
from tests.support.server_process import REPOSITORY, environment, free_port


@pytest.mark.requirement("V1")
def test_alive_ready_health_version(http: TestClient) -> None:
    assert http.get("/alive").json() == {"alive": True}
    assert http.get("/ready").json() == {"ready": True, "database": True, "storage": True}
    assert http.get("/health").text == "OK"
    assert http.get("/version").text.startswith("3.")
    for probe in ("/alive", "/ready", "/health", "/version"):
        asked = http.head(probe)
        assert (asked.status_code, asked.content) == (200, b"")


@pytest.mark.parametrize("path", ["/", "/v1/jobs", "/v1/models", "/v1/addresses", "/v1/runs/nobody"])
def test_head_is_get_without_its_body(http: TestClient, path: str) -> None:
    asked, got = http.head(path), http.get(path)
    assert (asked.status_code, asked.content) == (got.status_code, b"")
    assert asked.headers["content-length"] == got.headers["content-length"]


def test_head_is_timed_as_the_route_that_answers_it(breakable: TestClient) -> None:
    for path in ("/v1/addresses", "/no/such/path"):
        breakable.head(path)
    page = generate_latest(breakable.app.state.prometheus).decode()  # type: ignore[attr-defined]
    for endpoint in ("/v1/addresses", "unmatched"):
        assert f'hanzo_ml_api_request_duration_seconds_count{{endpoint="{endpoint}"}} 1.0' in page


def test_head_of_followed_log_returns_without_streaming(http: TestClient) -> None:
    http.post("/v1/datasets", data={"name": "d"}, files={"files": ("a.jsonl", b'{"text": "x"}\n')})
    job = http.post("/v1/jobs", json={"name": "j", "dataset": "d"}).json()["id"]
    asked = http.head(f"/v1/jobs/{job}/logs")
    assert (asked.status_code, asked.headers["content-type"], asked.content) == (
        200,
        "text/event-stream; charset=utf-8",
        b"",
    )


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/jobs", "GET, HEAD, POST"),
        ("DELETE", "/v1/models/m/versions/1/stage", "PATCH, PUT"),
        ("POST", "/alive", "GET, HEAD"),
        ("GET", "/api/2.0/mlflow/runs/create", "POST"),
    ],
)
def test_wrong_method_answers_405_with_allow_header(http: TestClient, method: str, path: str, allowed: str) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, answer.json()["error_code"]) == (405, "ENDPOINT_NOT_FOUND")
    assert answer.headers["allow"] == allowed
    assert "allow" not in http.request(method, "/no/such/path").headers


def test_server_starts_without_importing_heavy_libraries() -> None:
    heavy = {"numpy", "pyarrow", "polars", "jinja2", "tokenizers", "torch", "dagster", "optuna", "kubernetes"}
    code = f"import sys, api.server, api.app; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_server_module_loads_no_web_framework() -> None:
    code = "import sys, api.server; print(sorted({'fastapi', 'starlette', 'uvicorn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_garbage_collector_is_enabled_and_skips_objects_frozen_at_startup(tmp_path: Path) -> None:
    load = "from api.server import load_application; load_application(Settings.load())"
    code = f"import gc; from resources.settings.settings import Settings; {load}"
    shown = "print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {shown}"],
        cwd=REPOSITORY,
        env=environment(tmp_path, free_port(), {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "True True"


@pytest.mark.requirement("V7")
def test_not_ready_without_storage(breakable: TestClient) -> None:
    assert breakable.get("/ready").status_code == 200
    shutil.rmtree(breakable.app.state.settings.home / "objects")  # type: ignore[attr-defined]
    answer = breakable.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "database": True, "storage": False})
    assert breakable.get("/alive").status_code == 200


@pytest.mark.requirement("V7")
def test_not_ready_without_database(breakable: TestClient) -> None:
    with breakable.app.state.database.write() as connection:  # type: ignore[attr-defined]
        connection.exec_driver_sql("ALTER TABLE experiments RENAME TO gone")
    answer = breakable.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "database": False, "storage": True})
    assert breakable.get("/alive").status_code == 200


@pytest.mark.slow
def test_not_ready_while_postgresql_is_dead(tmp_path: Path) -> None:
    try:
        postgres = PostgresServer()
    except NoPostgres as problem:
        pytest.skip(str(problem))
    try:
        with answering(migrated(tmp_path, HANZO_ML_DATABASE_URL=postgres.url("postgres"))) as client:
            assert client.get("/ready").status_code == 200
            postgres.kill()
            answer = client.get("/ready")
            assert (answer.status_code, answer.json()) == (503, {"ready": False, "database": False, "storage": True})
            assert client.get("/alive").status_code == 200
            postgres.start()
            assert client.get("/ready").status_code == 200
    finally:
        postgres.stop()


def test_not_ready_when_postgresql_accepts_connections_but_never_responds(tmp_path: Path) -> None:
    """As a host that drops packets.

    A request hung for two minutes, and with it the thread that `/ready` needed.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/d"
        settings = Settings.load(
            {"HANZO_ML_HOME": str(tmp_path), "HANZO_ML_DATABASE_URL": url, "HANZO_ML_DATABASE_CONNECT_SECONDS": "2"}
        )
        client = TestClient(create_app(settings), base_url="http://127.0.0.1", raise_server_exceptions=False)
        answer = client.get("/v1/jobs")
        assert (answer.status_code, answer.json()["error_code"]) == (503, "TEMPORARILY_UNAVAILABLE")
        assert "try again later" in answer.json()["message"]


def test_hanging_probe_reports_not_ready_and_blocks_only_one_thread() -> None:
    hangs, asked = threading.Event(), []

    def ask() -> bool:
        asked.append(threading.current_thread().daemon)
        return hangs.wait(60)

    probe = Probe(ask, wait=0.05)

    async def several() -> list[bool]:
        return await asyncio.gather(*(probe.answers() for _ in range(5)))

    assert asyncio.run(several()) == [False] * 5
    assert asyncio.run(probe.answers()) is False
    assert asked == [True], "a daemon, which holds up no end of the process"
    hangs.set()
    assert comes_back(probe), "it is well again, and still not ready"


def comes_back(probe: Probe) -> bool:
    return any(asyncio.run(probe.answers()) for _ in range(600))


def test_abandoned_probe_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, asked = threading.Event(), []

    def ask() -> bool:
        asked.append(1)
        return len(asked) > 1 or hangs.wait(60)

    monkeypatch.setattr("api.health.ABANDON_SECONDS", 0.0)
    probe = Probe(ask, wait=0.05)
    assert asyncio.run(probe.answers()) is False
    assert comes_back(probe)
    hangs.set()


@pytest.mark.parametrize("kind", BUCKETS)
def test_not_ready_without_a_bucket(tmp_path: Path, s3_session: S3Server, kind: str) -> None:
    s3_session.empty()
    with answering(migrated(tmp_path, **on_s3(s3_session))) as client:
        assert client.get("/ready").status_code == 200
        s3_session.client.delete_bucket(Bucket=BUCKETS[kind])
        try:
            answer = client.get("/ready")
            assert (answer.status_code, answer.json()) == (503, {"ready": False, "database": True, "storage": False})
            assert client.get("/alive").status_code == 200
        finally:
            s3_session.empty()
        assert client.get("/ready").status_code == 200


@pytest.mark.slow
def test_server_exits_with_config_error_when_listening_on_network_without_sign_in(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "api.server"],
        cwd=REPOSITORY,
        env=environment(tmp_path, free_port(), {"HANZO_ML_SERVER_HOST": "0.0.0.0"}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    [line] = done.stderr.splitlines()
    assert done.returncode == 78 and "auth.verify_tokens" in line


Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return the one-line error of a server that must not start.

    It runs in this process, because starting Python takes longer than the rest.
    """

    def serves(*_: object, **__: object) -> None:
        raise AssertionError("it serves")

    def line(port: int | None = None, **settings: str) -> str:
        monkeypatch.setattr(os, "environ", environment(tmp_path, port or free_port(), settings))
        monkeypatch.setattr(uvicorn.Server, "run", serves)
        assert server.main() == 78
        [found] = capsys.readouterr().err.splitlines()
        return found

    return line


@pytest.mark.requirement("Z34")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "ml.example"])
def test_listening_on_network_without_sign_in_is_refused(refused: Refused, host: str) -> None:
    line = refused(HANZO_ML_SERVER_HOST=host)
    assert "auth.verify_tokens" in line and host in line


@pytest.mark.parametrize("url", ["http://hanzo.id", "https://user:pw@hanzo.id"])
def test_iam_url_with_plain_http_or_credentials_is_refused(refused: Refused, url: str) -> None:
    line = refused(HANZO_ML_AUTH_VERIFY_TOKENS="true", HANZO_ML_AUTH_IAM_URL=url)
    assert "auth.iam_url" in line


def test_metrics_port_in_use_is_reported_in_one_line(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {"HANZO_ML_METRICS_ENABLED": "true", "HANZO_ML_METRICS_PORT": str(port)}
        line = refused(**settings)
    assert f"port {port} on 127.0.0.1 is in use" in line and "HANZO_ML_METRICS_PORT" in line


def test_port_in_use_is_reported_in_one_line(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refused(port)


def test_unknown_setting_is_reported_in_one_line(refused: Refused) -> None:
    assert "HANZO_ML_SERVER_COLOUR" in refused(HANZO_ML_SERVER_COLOUR="red")


def test_unknown_compute_backend_is_refused_at_start(refused: Refused) -> None:
    line = refused(HANZO_ML_SCHEDULER_BACKEND="slurm")
    assert line.endswith(
        "HANZO_ML_SCHEDULER_BACKEND: 'scheduler.backend': unknown backend 'slurm', available: kubernetes, local"
    )


def test_several_workers_over_sqlite_are_refused(refused: Refused) -> None:
    assert refused(HANZO_ML_SERVER_WORKERS="2") == (
        "hanzo-ml: server.workers 2 needs PostgreSQL, because SQLite has one writer: "
        "set database.url to a postgresql:// address, or server.workers to 1"
    )
