"""A server process for a module, and an application without a process for what needs no network."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from resources.metadata.database import Database
from resources.settings import Settings
from tests.api.server_process import ServerProcess


@pytest.fixture(autouse=True)
def mlflow_forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """mlflow keeps its server in a global: the next test would call one that is gone, and again for minutes."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    yield
    if "mlflow" in sys.modules:
        sys.modules["mlflow"].set_tracking_uri(None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path / "home")})
    database = Database(settings.database_url)
    database.migrate()
    database.close()
    return settings


@pytest.fixture
def http(settings: Settings) -> Iterator[TestClient]:
    """Answers as the server would; an unexpected exception is the 500 that users would see."""
    with TestClient(create_app(settings), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client
