"""Several processes on one port share a database, count together, and stop with their parent.

Dead ones are replaced.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from api.prometheus import RequestHistogram
from tests.support.postgres_server import PostgresServer, postgres
from tests.support.server_process import ServerProcess, free_port

__all__ = ["postgres"]

WORKERS = 3
MLFLOW = "/api/2.0/mlflow"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Iterator[ServerProcess]:
    settings = {
        "HANZO_ML_DATABASE_URL": postgres.url(postgres.create()),
        "HANZO_ML_SERVER_WORKERS": str(WORKERS),
        "HANZO_ML_METRICS_ENABLED": "true",
        "HANZO_ML_METRICS_PORT": str(free_port()),
    }
    with ServerProcess(tmp_path_factory.mktemp("workers"), settings) as process:
        yield process


def workers(server: ServerProcess) -> list[int]:
    return list(map(int, Path(f"/proc/{server.process_id}/task/{server.process_id}/children").read_text().split()))


def sockets(process_id: int) -> list[str]:
    opened = (str(path.readlink()) for path in Path(f"/proc/{process_id}/fd").iterdir())
    return [name for name in opened if name.startswith("socket:")]


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def calls_counted(page: str, endpoint: str) -> float:
    [count] = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "hanzo_ml_api_request_duration_seconds_count" and sample.labels["endpoint"] == endpoint
    ]
    return count


@pytest.mark.slow
def test_parent_process_holds_no_database_connection_when_forking_workers(server: ServerProcess) -> None:
    assert len(sockets(server.process_id)) == 2, "where it listens, and no more"
    assert all(len(sockets(worker)) > 2 for worker in workers(server))


@pytest.mark.slow
def test_workers_start_without_their_database_and_report_not_ready(tmp_path: Path) -> None:
    nowhere = {"HANZO_ML_DATABASE_URL": f"postgresql://u@/x?host={tmp_path}", "HANZO_ML_SERVER_WORKERS": "2"}
    process = ServerProcess(tmp_path)
    process.environment.update(nowhere)
    process.ready = "/alive"
    with process:
        assert httpx.get(f"{process.url}/ready").status_code == 503


@pytest.mark.requirement("A4")
@pytest.mark.slow
def test_workers_serve_one_store_and_are_replaced(server: ServerProcess) -> None:
    run = httpx.post(f"{server.url}{MLFLOW}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    first = workers(server)
    assert len(first) == WORKERS
    logged = 0
    for round in range(2):
        for _ in range(20):
            # A new connection each time, so that it reaches any of them.
            point = {"run_id": run, "key": "loss", "value": logged, "timestamp": 1, "step": logged}
            assert httpx.post(f"{server.url}{MLFLOW}/runs/log-metric", json=point).status_code == 200
            logged += 1
        if round == 0:
            os.kill(first[-1], signal.SIGKILL)
            eventually(lambda: len(workers(server)) == WORKERS and first[-1] not in workers(server))
    history = httpx.get(f"{server.url}{MLFLOW}/metrics/get-history", params={"run_id": run, "metric_key": "loss"})
    assert [point["step"] for point in history.json()["metrics"]] == list(range(logged))
    page = httpx.get(f"http://127.0.0.1:{server.settings.metrics.port}/metrics").text
    assert calls_counted(page, f"{MLFLOW}/runs/log-metric") == logged


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(server: ServerProcess, number: signal.Signals) -> None:
    if not server.is_running:
        server.start()
    of_parent = workers(server)
    os.kill(server.process_id, number)
    eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in of_parent))
    eventually(lambda: not server.is_running)


def test_worker_histograms_are_summed_by_bucket() -> None:
    histogram = RequestHistogram(["/b", "/a", "/never"], workers=2)
    for worker, seconds in ((0, 0.001), (1, 0.0011), (1, 31.0), (0, 0.25)):
        histogram.count_as(worker)
        histogram.observe("/a", seconds)
    histogram.observe("/b", 0.5)
    registry = CollectorRegistry()
    registry.register(histogram)
    lines = generate_latest(registry).decode().splitlines()
    name = "hanzo_ml_api_request_duration_seconds"
    buckets = [line for line in lines if line.startswith(f'{name}_bucket{{endpoint="/a"')]
    found = {line.partition('le="')[2].partition('"')[0]: float(line.split(" ")[1]) for line in buckets}
    assert [found[le] for le in ("0.001", "0.0025", "0.1", "0.25", "30.0", "+Inf")] == [1, 2, 2, 3, 3, 4]
    assert f'{name}_count{{endpoint="/a"}} 4.0' in lines
    assert any(line.startswith(f'{name}_sum{{endpoint="/a"}} 31.252') for line in lines)
    assert not any("/never" in line for line in lines)
