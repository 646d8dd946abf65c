"""Registry clients under crashes: their histories must be consistent with one registry.

Version numbers are assigned once, in order and without gaps; at any time at most one version is in production; a param that
was acknowledged stays stored; a tag has the last value that was set; a run with an idempotency key is created once;
acknowledged calls are in the audit log. A call that failed may have been applied or not, but only once.
"""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from uuid import uuid4

import httpx
from sqlalchemy import bindparam, select

from resources.metadata.audit_log import list_calls
from resources.metadata.database import Database
from resources.metadata.outbox import read_after
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.registered_models import RegisteredModels
from resources.metadata.registry.search import page_versions
from resources.metadata.registry.version_lifecycle import Registry
from resources.metadata.tables import run_tags
from resources.metadata.tracking.tracking import Tracking
from tests.api.waiting import wait_for
from tests.support.server_process import ServerProcess

API = "/api/2.0/mlflow"
MODEL = "lighthouse"
PARAMS = 12
OF_CLIENT = "client"
RUN_TAG, MODEL_TAG = TAGS = ("/runs/set-tag", "/registered-models/set-tag")
REGISTER, PROMOTE = "/model-versions/create", "/model-versions/transition-stage"


@dataclass
class Tagged:
    """The newest number that a client sent for its own tag, and the newest acknowledged."""

    sent: int = 0
    acknowledged: int = 0


class Client(threading.Thread):
    """Runs registry calls in a loop until it is stopped.

    Registers versions, promotes any of them, sets tags, creates runs and races for params. Records every response.
    """

    def __init__(self, url: str, run_id: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self._run, self._chance = url, run_id, random.Random(seed)
        self._enough = threading.Event()
        self.name = f"client-{seed}"
        self.completed_calls = 0
        self.changes: Counter[str] = Counter()
        self.versions: list[int] = []
        self.params: dict[str, str] = {}
        self.tagged = {path: Tagged() for path in TAGS}
        self.runs: list[str] = []
        self._key = uuid4().hex
        self.faults: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._url + API, timeout=30) as http:
            while not self._enough.is_set():
                try:
                    self._chance.choice(
                        (self._register, self._promote, self._log_param, self._tag, self._begin, self._look)
                    )(http)
                except httpx.TransportError:
                    time.sleep(0.02)

    def stop(self) -> None:
        self._enough.set()
        self.join()

    def _register(self, http: httpx.Client) -> None:
        source = f"mlflow-artifacts:/0/{self._run}/artifacts/model"
        answer = http.post(REGISTER, json={"name": MODEL, "source": source, "run_id": self._run})
        if self._acknowledged(answer):
            self.changes[REGISTER] += 1
            self.versions.append(int(answer.json()["model_version"]["version"]))

    def _promote(self, http: httpx.Client) -> None:
        if self.versions:
            version = str(self._chance.choice(self.versions))
            body = {"name": MODEL, "version": version, "stage": "Production", "archive_existing_versions": True}
            self.changes[PROMOTE] += self._acknowledged(http.post(PROMOTE, json=body))

    def _log_param(self, http: httpx.Client) -> None:
        key = f"p{self._chance.randrange(PARAMS)}"
        answer = http.post("/runs/log-parameter", json={"run_id": self._run, "key": key, "value": self.name})
        if answer.status_code == 400 and "not allowed" in answer.text:
            self.completed_calls += 1
        elif self._acknowledged(answer):
            self.params[key] = self.name

    def _tag(self, http: httpx.Client) -> None:
        path = self._chance.choice(TAGS)
        tagged = self.tagged[path]
        tagged.sent += 1
        what = {"run_id": self._run} if path == RUN_TAG else {"name": MODEL}
        body = {**what, "key": self.name, "value": str(tagged.sent)}
        if self._acknowledged(http.post(path, json=body)):
            tagged.acknowledged = tagged.sent

    def _begin(self, http: httpx.Client) -> None:
        """Repeat a request that was not acknowledged later, with the same key."""
        body = {"experiment_id": "0", "tags": [{"key": OF_CLIENT, "value": self.name}]}
        answer = http.post("/runs/create", json=body, headers={"Idempotency-Key": self._key})
        if self._acknowledged(answer):
            self.runs.append(answer.json()["run"]["info"]["run_id"])
            self._key = uuid4().hex

    def _look(self, http: httpx.Client) -> None:
        answer = http.get("/model-versions/search", params={"filter": f"name='{MODEL}'", "max_results": 1000})
        if self._acknowledged(answer):
            stages = [version["current_stage"] for version in answer.json().get("model_versions", [])]
            if stages.count("Production") > 1:
                self.faults.append(f"{stages.count('Production')} versions in production at once")

    def _acknowledged(self, answer: httpx.Response) -> bool:
        if answer.status_code not in (200, 503):
            self.faults.append(f"{answer.request.url}: {answer.status_code} {answer.text}")
        self.completed_calls += answer.status_code == 200
        return answer.status_code == 200


class RegistryHistory:
    """Clients that use one model and one run of the servers."""

    def __init__(self, servers: list[ServerProcess], database: Database) -> None:
        self._database = database
        self._tracking, self._registry = Tracking(database), Registry(database)
        self._model = ModelKey("default", MODEL)
        self._run = self._tracking.runs.create(0).id
        place = f"{servers[0].url}/api/2.0/mlflow-artifacts/artifacts/0/{self._run}/artifacts/model/w.bin"
        assert httpx.put(place, content=b"w").status_code == 200
        with database.write() as connection:
            self._registry.ensure_model(connection, self._model)
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")  # to reproduce a failure
        self._clients = [Client(servers[number % len(servers)].url, self._run, seed + number) for number in range(4)]
        for client in self._clients:
            client.start()

    def wait_for_progress(self) -> None:
        """Wait until some more calls of every client were acknowledged."""
        wanted = [client.completed_calls + 15 for client in self._clients]
        wait_for(lambda: all(c.faults or c.completed_calls >= w for c, w in zip(self._clients, wanted, strict=True)))

    def check(self) -> None:
        """Assert that every acknowledged response agrees with the stored state."""
        clients, model = self._clients, self._model
        for client in clients:
            client.stop()
        faults = [fault for client in clients for fault in client.faults]
        assert not faults, faults
        found, token = page_versions(self._database, model)
        while token:
            more, token = page_versions(self._database, model, page_token=token)
            found += more
        numbers = [version.version for version in found]
        assert numbers == list(range(len(numbers), 0, -1)), "a gap, or a number twice"
        client_versions = [number for client in clients for number in client.versions]
        assert len(client_versions) == len(set(client_versions)), "two clients were given one version"
        assert set(client_versions) <= set(numbers), "a version that was acknowledged is lost"
        for client in clients:
            assert client.versions == sorted(client.versions), "numbers went back"
        assert [version.stage for version in found].count("production") <= 1
        stored = self._tracking.run_data.params(self._run)
        for client in clients:
            assert client.params.items() <= stored.items(), "a param that was acknowledged has another value"
        self._check_tags()
        self._check_runs()
        with self._database.read() as connection:
            events = read_after(connection, 0, types=["model.registered"], limit=100_000)
            calls = list_calls(connection, "default", limit=100_000)
        assert [event.payload["version"] for event in events] == list(range(1, len(numbers) + 1))
        changes = {route: sum(client.changes[route] for client in clients) for route in (REGISTER, PROMOTE)}
        for route, acknowledged in changes.items():
            recorded = [call for call in calls if call.payload["route"].endswith(route) and call.payload["status"] == 200]
            assert len(recorded) >= acknowledged > 0, "a change that was acknowledged is not in the audit log"

    def _check_tags(self) -> None:
        of_run, of_model = self._tracking.run_data.tags(self._run), RegisteredModels(self._database).get(self._model).tags
        for path, tags in ((RUN_TAG, of_run), (MODEL_TAG, of_model)):
            assert any(client.tagged[path].acknowledged for client in self._clients)
            for client in self._clients:
                tagged = client.tagged[path]
                assert tagged.acknowledged <= int(tags.get(client.name, 0)) <= tagged.sent, "an acknowledged tag is lost"

    def _check_runs(self) -> None:
        with self._database.read() as connection:
            query = select(run_tags.c.run_id).where(run_tags.c.key == OF_CLIENT, run_tags.c.value == bindparam("client"))
            made = {c.name: set(connection.execute(query, {"client": c.name}).scalars()) for c in self._clients}
        assert any(client.runs for client in self._clients)
        for client in self._clients:
            assert len(client.runs) == len(set(client.runs)), "one run was made for two keys"
            assert set(client.runs) <= made[client.name], "a run that was acknowledged is lost"
            # The last request may be stored, though its client got no response.
            assert len(made[client.name]) <= len(client.runs) + 1, "a run was made twice"
