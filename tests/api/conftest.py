"""One server process and one application in this process, shared by all files.

Starting them takes longer than most tests. A test on the process creates objects under unique names; each test on the
application finds an empty store.
"""

import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.app import create_app
from api.dependencies import from_own_user
from resources.metadata.database import Database
from resources.metadata.tables.base import schema
from resources.metadata.tracking.tracking import Tracking
from resources.settings.settings import Settings
from tests.api.artifact_server import on_s3
from tests.api.conformance import Conformance
from tests.support.migrated_database import migrate
from tests.support.postgres_server import PostgresServer, postgres
from tests.support.s3_server import S3Server
from tests.support.server_process import ServerProcess

__all__ = ["postgres"]


@pytest.fixture(autouse=True)
def mlflow_forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the server address that mlflow keeps in a global.

    The next test would call a stopped server, and retry for minutes.
    """
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    yield
    if "mlflow" in sys.modules:
        sys.modules["mlflow"].set_tracking_uri(None)


@pytest.fixture(scope="session")
def conformance(tmp_path_factory: pytest.TempPathFactory) -> Conformance:
    """Share one document among clients of a process: it is that of any application."""
    return Conformance(create_app(Settings.load({"HANZO_ML_HOME": str(tmp_path_factory.mktemp("described"))})))


def over(extra: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """Start a server that may import datasets from a folder and a bucket.

    The folder is `allowed`, next to the server's own.
    """
    around = tmp_path_factory.mktemp("server")
    for name in ("home", "allowed"):
        (around / name).mkdir()
    imports = {"HANZO_ML_STORAGE_IMPORT_FROM": f"{(around / 'allowed').as_uri()},s3://raw-files/ours"}
    return ServerProcess(around / "home", {**imports, **extra})


@pytest.fixture(scope="session")
def server_on_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with over({}, tmp_path_factory) as process:
        yield process


@pytest.fixture(scope="session")
def server_on_s3(
    s3_session: S3Server, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Also on PostgreSQL, as in a cluster."""
    s3_session.empty()
    cluster = {
        **on_s3(s3_session),
        "HANZO_ML_STORAGE_PUBLIC_ENDPOINT": s3_session.url,
        "HANZO_ML_DATABASE_URL": postgres.url(postgres.create()),
    }
    with over(cluster, tmp_path_factory) as process:
        yield process


@pytest.fixture(scope="module")
def server(server_on_folder: ServerProcess) -> ServerProcess:
    return server_on_folder


@pytest.fixture(scope="module", params=["folder", "s3"])
def server_on_either(request: pytest.FixtureRequest) -> ServerProcess:
    """Run a file's tests on a folder and SQLite, then on S3 and PostgreSQL."""
    found: ServerProcess = request.getfixturevalue(f"server_on_{request.param}")
    return found


def answering(settings: Settings) -> TestClient:
    """Return a client that responds as the server would.

    An unexpected exception is the 500 that users would see. A response that contradicts the OpenAPI document fails the
    test that got it.
    """
    app = create_app(settings)
    # Without a connection there is no peer.
    app.dependency_overrides[from_own_user] = lambda: True
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    client.event_hooks = {"response": [Conformance(app).check]}
    return client


@dataclass(frozen=True)
class Application:
    """An application on a folder; `begin` resets its database to the state after start."""

    settings: Settings
    client: TestClient
    begin: Callable[[], None]

    def empty(self) -> None:
        self.begin()
        for found in self.settings.home.glob("objects/*/[!.]*"):
            shutil.rmtree(found) if found.is_dir() else found.unlink()


def migrated(home: Path, **more: str) -> Settings:
    settings = Settings.load({"HANZO_ML_HOME": str(home), **more})
    database = Database(settings.database_url)
    migrate(database)
    database.close()
    return settings


@pytest.fixture(scope="session")
def application_on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    settings, start = migrated(tmp_path_factory.mktemp("home")), tmp_path_factory.mktemp("start") / "metadata.db"
    file = Path(Database(settings.database_url).engine.url.database or "")

    def begin() -> None:
        with closing(sqlite3.connect(file, isolation_level=None)) as database:
            database.execute("ATTACH ? AS start", [str(start)])
            database.execute("BEGIN IMMEDIATE")
            for (table,) in database.execute("SELECT name FROM start.sqlite_master WHERE type = 'table'").fetchall():
                database.execute(f'DELETE FROM main."{table}"')
                database.execute(f'INSERT INTO main."{table}" SELECT * FROM start."{table}"')
            database.execute("COMMIT")

    with answering(settings) as client:
        with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(start)) as target:
            source.backup(target)
        yield Application(settings, client, begin)


@pytest.fixture(scope="session")
def application_on_postgresql(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    settings = migrated(tmp_path_factory.mktemp("home"), HANZO_ML_DATABASE_URL=postgres.url(postgres.create()))
    database = Database(settings.database_url)
    tracking = Tracking(database)
    names = ", ".join(table.name for table in schema.sorted_tables)

    def begin() -> None:
        with database.write() as connection:
            connection.execute(text(f"TRUNCATE {names} RESTART IDENTITY CASCADE"))
        tracking.experiments.ensure_default()

    with answering(settings) as client:
        yield Application(settings, client, begin)
    database.close()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def application(request: pytest.FixtureRequest) -> Application:
    """Run a file's tests on SQLite, then on PostgreSQL."""
    found: Application = request.getfixturevalue(f"application_on_{request.param}")
    return found


@pytest.fixture
def settings(application: Application) -> Settings:
    application.empty()
    return application.settings


@pytest.fixture
def http(application: Application, settings: Settings) -> TestClient:
    return application.client


@pytest.fixture
def breakable(tmp_path: Path) -> Iterator[TestClient]:
    """Start an application that only this test uses."""
    with answering(migrated(tmp_path / "home")) as client:
        yield client
