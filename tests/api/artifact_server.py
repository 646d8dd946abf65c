"""Start a server over a folder or S3, with a run's artifacts."""

import http.client
from dataclasses import dataclass
from typing import Any

import httpx

from recipes.storage.artifact_store import Store
from resources.metadata.artifacts.file_hashes import FileHashes
from resources.metadata.database import Database
from resources.metadata.outbox import read_after
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.support.server_process import ServerProcess

PROXY = "/api/2.0/mlflow-artifacts/artifacts"
LIST = "/api/2.0/mlflow/artifacts/list"


def on_s3(s3: S3Server) -> dict[str, str]:
    return {
        "HANZO_ML_STORAGE_ENDPOINT": s3.url,
        "HANZO_ML_STORAGE_ACCESS_KEY": ACCESS_KEY,
        "HANZO_ML_STORAGE_SECRET_KEY": SECRET_KEY,
    }


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


@dataclass(frozen=True)
class ArtifactServer:
    process: ServerProcess

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def store(self) -> Store:
        return Store(self.process.settings.store, self.process.settings.storage.variables)

    @property
    def records(self) -> FileHashes:
        return FileHashes(Database(self.process.settings.database_url))

    def new_run(self) -> str:
        answer = httpx.post(f"{self.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"})
        return str(answer.json()["run"]["info"]["run_id"])

    def files(self, run_id: str, path: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}{LIST}", params={"run_id": run_id, "path": path}).json()["files"]
        return found

    def place(self, run_id: str, name: str) -> str:
        return f"{PROXY}/0/{run_id}/artifacts/{name}"

    def raw(self, method: str, path: str, body: Any = b"", headers: dict[str, str] | None = None) -> Answer:
        """Send a request whose path is not normalized: other clients clean it up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=120)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def broken_events(self) -> list[dict[str, Any]]:
        database = Database(self.process.settings.database_url)
        with database.read() as connection:
            found = [dict(event.payload) for event in read_after(connection, 0, ["artifact.broken"], 1000)]
        database.close()
        return found
