"""Health, and the servers that refuse to start (rows V1, V7)."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from resources.settings import Settings
from tests.api.server_process import REPOSITORY, environment, free_port


def test_alive_ready_health_version(http: TestClient) -> None:
    assert http.get("/alive").json() == {"alive": True}
    assert http.get("/ready").json() == {"ready": True, "database": True, "storage": True}
    assert http.get("/health").text == "OK"
    assert http.get("/version").text.startswith("3.")


def test_not_ready_without_storage(http: TestClient, settings: Settings) -> None:
    assert http.get("/ready").status_code == 200
    shutil.rmtree(settings.home / "objects")
    answer = http.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "database": True, "storage": False})
    assert http.get("/alive").status_code == 200


def test_not_ready_without_database(http: TestClient) -> None:
    with http.app.state.database.write() as connection:  # type: ignore[attr-defined]
        connection.exec_driver_sql("ALTER TABLE experiments RENAME TO gone")
    answer = http.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "database": False, "storage": True})
    assert http.get("/alive").status_code == 200


def refused(home: Path, port: int, **settings: str) -> str:
    """The one line of a server that must not start."""
    done = subprocess.run(
        [sys.executable, "-m", "api.server"],
        cwd=REPOSITORY,
        env=environment(home, port, settings),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 78, done.stderr
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "ml.example"])
def test_a_network_without_sign_in_is_refused(tmp_path: Path, host: str) -> None:
    line = refused(tmp_path, free_port(), HANZO_ML_SERVER_HOST=host)
    assert "auth.verify_tokens" in line and host in line


@pytest.mark.parametrize("url", ["http://hanzo.id", "https://user:pw@hanzo.id"])
def test_an_iam_that_anybody_could_play_is_refused(tmp_path: Path, url: str) -> None:
    line = refused(tmp_path, free_port(), HANZO_ML_AUTH_VERIFY_TOKENS="true", HANZO_ML_AUTH_IAM_URL=url)
    assert "auth.iam_url" in line


def test_a_metrics_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {"HANZO_ML_METRICS_ENABLED": "true", "HANZO_ML_METRICS_PORT": str(port)}
        line = refused(tmp_path, free_port(), **settings)
    assert f"port {port} on 127.0.0.1 is in use" in line and "HANZO_ML_METRICS_PORT" in line


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refused(tmp_path, port)


def test_a_bad_setting_is_one_line(tmp_path: Path) -> None:
    assert "HANZO_ML_SERVER_COLOUR" in refused(tmp_path, free_port(), HANZO_ML_SERVER_COLOUR="red")
