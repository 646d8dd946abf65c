"""Real replicas of a pulling engine, and the real API that they pull from."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil

from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.metadata.registry import deployments, engine_replicas
from resources.metadata.registry.deployments import Deployment
from resources.metadata.registry.engine_replicas import Replica
from resources.metadata.registry.model_names import ModelKey
from resources.serving.client import EngineClient
from resources.serving.replicated_engine import ReplicatedEngine
from tests.resources.serving.gateway_process import ROOT, wait_until
from tests.support.free_ports import free_port
from tests.support.server_process import ServerProcess

PROMPTS = ("Who keeps the lamp?",)
LOAD_SECONDS = 120.0


class Deployer:
    """Perform the database and store operations of the deployment asset."""

    def __init__(self, database: Database, store: Store) -> None:
        self.database = database
        self.store = store
        self.engine = ReplicatedEngine(database)
        self._promotions = 0

    def upload(self, name: str, file: Path) -> str:
        """Store a model file and return its URI."""
        uri = f"s3://hanzo-models/{name}/model.gguf"
        self.store.put_file(uri, file)
        return uri

    def begin(self, version: int, uri: str, sha256: str, name: str = "keeper") -> tuple[Deployment, int]:
        """Request that a version is served; return its deployment and the attempt."""
        self._promotions += 1
        with self.database.write() as connection:
            row = deployments.begin_deployment(
                connection,
                ModelKey("default", name),
                version=version,
                promotion=self._promotions,
                url="http://engine",
                sha256=sha256,
            )
            size = self.store.size(uri)
            attempt = engine_replicas.record_file(connection, row, uri=uri, size_bytes=size, smoke_prompts=PROMPTS)
        return row, attempt

    def deploy(self, version: int, uri: str, sha256: str, name: str = "keeper") -> Deployment:
        """Deploy a version to all replicas, or raise what the engine reports."""
        row, attempt = self.begin(version, uri, sha256, name)
        try:
            self.engine.await_serving(row, attempt, LOAD_SECONDS)
        except Exception as error:
            with self.database.write() as connection:
                deployments.mark_failed(connection, row, str(error))
            raise
        with self.database.write() as connection:
            assert deployments.mark_serving(connection, row)
        return row

    def replicas(self) -> list[Replica]:
        with self.database.read() as connection:
            return engine_replicas.list_live_replicas(connection)

    def states(self, deployment: Deployment) -> list[str]:
        """Return the status of a deployment on each live replica that reports it."""
        found = [replica.deployment(deployment.id) for replica in self.replicas()]
        return [each["status"] for each in found if each is not None]


class ControlPlaneProcess(Deployer):
    """Run the API as a process, with a deployer on the same database and store."""

    def __init__(self, home: Path) -> None:
        self.server = ServerProcess(home)
        super().__init__(Database(self.server.settings.database_url), Store(self.server.settings.store))

    def close(self) -> None:
        self.server.stop()
        self.database.close()


class ReplicaProcess:
    """Run `python -m resources.serving.replica`, restartable on the same port and cache."""

    def __init__(self, home: Path, api_url: str, **settings: str) -> None:
        self.home = home
        home.mkdir(exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine = EngineClient(self.url)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HANZO_ML_")}
        self._environment = {
            **kept,
            "HANZO_ML_HOME": str(home),
            "HANZO_ML_ENGINE_MODE": "pull",
            "HANZO_ML_ENGINE_PORT": str(self.port),
            "HANZO_ML_ENGINE_API_URL": api_url,
            "HANZO_ML_ENGINE_DRAIN": "2s",
            "HANZO_ML_LOGGING_FORMAT": "text",
            **{f"HANZO_ML_ENGINE_{key.upper()}": value for key, value in settings.items()},
        }
        self.log = home / "replica.log"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "resources.serving.replica"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)
        wait_until(lambda: self.get("/health") is not None)
        return self.process

    def get(self, path: str) -> httpx.Response | None:
        try:
            return httpx.get(self.url + path, trust_env=False)
        except httpx.TransportError:
            return None

    def ready(self) -> dict[str, Any]:
        answer = self.get("/ready")
        return answer.json() if answer is not None else {"ready": False, "reason": "it does not answer"}

    def wait_ready(self) -> None:
        wait_until(lambda: self.ready()["ready"], LOAD_SECONDS)

    def backends(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        self.process.wait(timeout=60)
