"""Acknowledged writes are stored once and audited, even when processes are killed.

Server or PostgreSQL are killed while several clients log and register.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from resources.metadata.audit_log import flush_counts, list_calls, record_calls
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.tracking import Tracking
from tests.api.registry_history import RegistryHistory
from tests.api.waiting import wait_for
from tests.support.postgres_server import PostgresServer, postgres, postgres_url
from tests.support.server_process import ServerProcess

__all__ = ["postgres", "postgres_url"]

RUNS = "/api/2.0/mlflow/runs"
BATCH = 20


class Client(threading.Thread):
    """Sends logging calls to its run until it is stopped.

    Failed calls are repeated, as MLflow's client does.
    """

    def __init__(self, url: str, run_id: str, name: str) -> None:
        super().__init__(daemon=True)
        self._url, self._run, self._name = url, run_id, name
        self._enough = threading.Event()
        self.acknowledged = 0
        self.refused: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._enough.is_set():
                path, body, _, _ = self.call(self.acknowledged)
                try:
                    answer = http.post(f"{RUNS}/{path}", json={"run_id": self._run, **body})
                except httpx.TransportError:
                    time.sleep(0.02)
                    continue
                if answer.status_code == 200:
                    self.acknowledged += 1
                elif answer.status_code != 503:
                    self.refused.append(answer.text)
                    return

    def stop(self) -> None:
        self._enough.set()
        self.join()

    def acknowledged_calls(self) -> Counter[tuple[str, str]]:
        """Return the number of acknowledged calls, by run and path."""
        return Counter((f"run:{self._run}", self.call(number)[0]) for number in range(self.acknowledged))

    def call(self, number: int) -> tuple[str, dict[str, Any], set[int], dict[str, str]]:
        """Return the call of that number: path, body, stored steps and stored params."""
        if number % 3 == 0:
            return "log-metric", self._point(number * BATCH), {number * BATCH}, {}
        param = {"key": f"{self._name}/{number}", "value": str(number)}
        if number % 3 == 1:
            return "log-parameter", param, set(), {param["key"]: param["value"]}
        steps = range(number * BATCH, (number + 1) * BATCH)
        body = {"metrics": [self._point(step) for step in steps], "params": [param], "tags": []}
        return "log-batch", body, set(steps), {param["key"]: param["value"]}

    def _point(self, step: int) -> dict[str, Any]:
        return {"key": self._name, "value": step / 7, "timestamp": step, "step": step}

    def check(self, tracking: Tracking) -> None:
        """Assert that every acknowledged call is stored once, as sent.

        At most the call that failed last may be stored too.
        """
        assert self.refused == []
        stored = [(point.step, point.value) for point in tracking.metrics.history(self._run, self._name, 10**9).points]
        params = {k: v for k, v in tracking.run_data.params(self._run).items() if k.startswith(f"{self._name}/")}
        steps: set[int] = set()
        values: dict[str, str] = {}
        for number in range(self.acknowledged):
            _, _, new_steps, new_params = self.call(number)
            steps |= new_steps
            values.update(new_params)
        _, _, last_steps, last_params = self.call(self.acknowledged)
        assert sorted(stored) == sorted({(step, step / 7) for step, _ in stored})
        assert steps <= {step for step, _ in stored} <= steps | last_steps
        assert values.items() <= params.items() <= {**values, **last_params}.items()
        if stored:
            [newest] = [point for point in tracking.metrics.latest(self._run) if point.key == self._name]
            assert newest.step == max(step for step, _ in stored)


def wait_for_progress(clients: list[Client], calls: int = 20) -> None:
    """Wait until each client has so many more calls acknowledged."""
    wanted = [client.acknowledged + calls for client in clients]
    wait_for(lambda: all(c.refused or c.acknowledged >= number for c, number in zip(clients, wanted, strict=True)))


def clients_of(servers: list[ServerProcess], tracking: Tracking) -> list[Client]:
    """Start four clients, spread over the servers; two log to one run together."""
    shared, own = (tracking.runs.create(0).id for _ in range(2))
    clients = [
        Client(server.url, run, f"{name}{number}")
        for number, server in enumerate(islice(cycle(servers), 2))
        for name, run in (("shared", shared), ("own", own))
    ]
    for client in clients:
        client.start()
    return clients


def check(clients: list[Client], tracking: Tracking) -> None:
    for client in clients:
        client.stop()
    for client in clients:
        client.check(tracking)


def killed(servers: list[ServerProcess], database: Database, kills: Sequence[Callable[[], None]]) -> None:
    """Run clients of both kinds during the kills, then check their acknowledged calls."""
    tracking = Tracking(database)
    registry = RegistryHistory(servers, database)
    clients = clients_of(servers, tracking)
    for kill in [*kills, None]:
        wait_for_progress(clients)
        registry.wait_for_progress()
        if kill:
            kill()
    check(clients, tracking)
    registry.check()
    check_audit(clients, database, len(kills))
    database.close()


def check_audit(clients: list[Client], database: Database, kills: int) -> None:
    """Assert that all acknowledged calls are counted, though the servers were killed.

    At most those that a kill left without a response are counted too.
    """
    with database.write() as connection:
        record_calls(connection, flush_counts(connection, now_ms(), 0))
        calls = [event.payload for event in list_calls(connection, "default", limit=10**6)]
    counted: Counter[tuple[str, str]] = Counter()
    for call in calls:
        if call["status"] == 200 and len(call["objects"]) == 1:
            counted[call["objects"][0], call["route"].rpartition("/")[2]] += call["count"]
    acknowledged: Counter[tuple[str, str]] = Counter()
    for client in clients:
        acknowledged += client.acknowledged_calls()
    for kind, number in acknowledged.items():
        # A call without a response may be stored twice: by PostgreSQL's fast path and by the group writer.
        assert number <= counted[kind] <= number + 2 * kills * len(clients), kind


@pytest.mark.slow
def test_acknowledged_writes_survive_kills_of_a_server_on_sqlite(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        killed([server], Database(server.settings.database_url), [partial(restart, server)] * 2)


@pytest.mark.slow
def test_acknowledged_writes_survive_kills_of_postgresql_and_of_two_servers(
    tmp_path: Path, postgres: PostgresServer, postgres_url: str
) -> None:
    with ExitStack() as stack:
        address = {"HANZO_ML_DATABASE_URL": postgres_url}  # and one folder, which is their object store
        servers = [stack.enter_context(ServerProcess(tmp_path, address)) for _ in range(2)]
        kills = (
            partial(restart, servers[0]),
            partial(kill_a_backend, postgres_url),
            partial(kill_and_start, postgres),
            partial(kill_all, servers, postgres),
        )
        killed(servers, Database(postgres_url), kills)


def kill_a_backend(url: str) -> None:
    """PostgreSQL restarts all processes when one dies: every open transaction is lost."""
    with psycopg.connect(url, autocommit=True) as connection:
        others = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        [pid, *_] = connection.execute(others).fetchone() or [0]
        assert pid
        os.kill(pid, signal.SIGKILL)


def kill_and_start(postgres: PostgresServer) -> None:
    postgres.kill()
    postgres.start()


def kill_all(servers: list[ServerProcess], postgres: PostgresServer) -> None:
    """Kill the database and all that writes to it, as when a machine is lost."""
    for server in servers:
        server.kill()
    kill_and_start(postgres)
    for server in servers:
        server.start()


def restart(server: ServerProcess) -> None:
    server.kill()
    server.start()
