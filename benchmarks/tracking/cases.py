"""Measured cases, and the required ratios to other servers."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.tracking.load_generator import API, Call, Client, latencies, median

BATCH = 1000
HISTORY = 100_000
NOW = 1_700_000_000_000
EXPERIMENT = "search"
FRESH = 400
PAGE = 100


@dataclass
class Loaded:
    """A running server, with what was logged to it for the reading cases."""

    port: int
    experiment: str = ""
    run: str = ""
    """Id of the run with the long history."""
    small: str = ""
    """Id of one of the searched runs."""
    made: dict[int, str] = field(default_factory=dict)
    calls: int = 0


@dataclass(frozen=True)
class Measured:
    """The figure of one round in its case's unit, and the number of calls."""

    figure: float
    calls: int


@dataclass(frozen=True)
class Case:
    name: str
    clients: int
    unit: str
    more_is_better: bool
    measure: Callable[[Loaded, int, float], Measured]
    reads: bool = False


def new_run(client: Client, experiment: str = "0") -> str:
    body = {"experiment_id": experiment, "start_time": time.time_ns() // 1_000_000}
    return str(client.json("POST", "runs/create", body)["run"]["info"]["run_id"])


def own_runs(server: Loaded, clients: int) -> list[str]:
    client = Client(server.port)
    for number in range(clients):
        if number not in server.made:
            server.made[number] = new_run(client)
    client.close()
    # Steps continue after the last round: logging the same steps again would be cheaper.
    server.calls += 1_000_000
    return [server.made[number] for number in range(clients)]


def log_metric(server: Loaded, clients: int, seconds: float) -> Measured:
    runs, base = own_runs(server, clients), server.calls

    def call(number: int, n: int) -> Call:
        body = {"run_id": runs[number], "run_uuid": runs[number], "key": "loss", "value": random.random()}
        return "POST", API + "runs/log-metric", json.dumps({**body, "timestamp": NOW + base + n, "step": base + n}).encode()

    calls = len(latencies(server.port, clients, seconds, call))
    return Measured(calls / seconds, calls)


def log_batch(server: Loaded, clients: int, seconds: float) -> Measured:
    runs, base = own_runs(server, clients), server.calls

    def call(number: int, n: int) -> Call:
        return (
            "POST",
            API + "runs/log-batch",
            json.dumps({"run_id": runs[number], "metrics": points(base + n * 100)}).encode(),
        )

    calls = len(latencies(server.port, clients, seconds, call))
    return Measured(calls / seconds * BATCH, calls)


def points(first: int) -> list[dict[str, object]]:
    """Return a batch: ten metrics, a hundred steps."""
    return [
        {
            "key": f"train/metric_{n % 10}",
            "value": random.random(),
            "timestamp": NOW + first + n // 10,
            "step": first + n // 10,
        }
        for n in range(BATCH)
    ]


def search(server: Loaded, clients: int, seconds: float) -> Measured:
    query = {"filter": "params.p1 = 'v3' and metrics.m2 > 2.5", "order_by": ["metrics.m3 DESC"], "max_results": 100}
    return asked(server, clients, seconds, searching(server, query))


def search_all(server: Loaded, clients: int, seconds: float) -> Measured:
    return asked(server, clients, seconds, searching(server, {"max_results": 1000}))


def search_first(server: Loaded, clients: int, seconds: float) -> Measured:
    """Search pages of new runs, which no server can have cached."""
    client = Client(server.port)
    experiment = str(client.json("POST", "experiments/create", {"name": f"{EXPERIMENT}-{time.time_ns()}"})["experiment_id"])
    add_runs(client, experiment, FRESH)
    body: dict[str, object] = {"experiment_ids": [experiment], "max_results": PAGE}
    taken: list[float] = []
    while len(taken) < FRESH / PAGE:
        began = time.perf_counter()
        page = client.json("POST", "runs/search", body)
        taken.append(time.perf_counter() - began)
        body["page_token"] = page.get("next_page_token", "")
    client.close()
    return Measured(median(taken) * 1000, 2 * FRESH + len(taken))  # including the calls that created the runs


def searching(server: Loaded, query: dict[str, object]) -> Call:
    """Return a search call. Raises RuntimeError if it finds nothing, which would be fast."""
    call = "POST", API + "runs/search", json.dumps({"experiment_ids": [server.experiment], **query}).encode()
    client = Client(server.port)
    found = json.loads(client.call(call)).get("runs")
    client.close()
    if not found:
        raise RuntimeError(f"a search for {query} finds none of the runs that were logged")
    return call


def get_run(server: Loaded, clients: int, seconds: float) -> Measured:
    """Get a run with ten params, ten metrics and three tags."""
    return asked(server, clients, seconds, ("GET", f"{API}runs/get?run_id={server.small}", b""))


def get_experiment(server: Loaded, clients: int, seconds: float) -> Measured:
    return asked(server, clients, seconds, ("GET", f"{API}experiments/get?experiment_id={server.experiment}", b""))


def find_experiment(server: Loaded, clients: int, seconds: float) -> Measured:
    return asked(server, clients, seconds, ("GET", f"{API}experiments/get-by-name?experiment_name={EXPERIMENT}", b""))


def asked(server: Loaded, clients: int, seconds: float, call: Call) -> Measured:
    """Return the median time of a repeated call."""
    taken = latencies(server.port, clients, seconds, lambda *_: call)
    return Measured(median(taken) * 1000, len(taken))


def history(server: Loaded, clients: int, seconds: float) -> Measured:
    """Read all pages of a history; the time to parse them is not counted."""
    client = Client(server.port)
    token, found, taken = "", 0, 0.0
    while True:
        path = f"{API}metrics/get-history?run_id={server.run}&metric_key=loss&page_token={token}"
        began = time.perf_counter()
        answer = client.call(("GET", path, b""))
        taken += time.perf_counter() - began
        page = json.loads(answer)
        found += len(page["metrics"])
        token = page.get("next_page_token", "")
        if not token:
            break
    client.close()
    if found != HISTORY:
        raise RuntimeError(f"the history has {found} points, {HISTORY} were logged")
    return Measured(taken, 1)


CASES = (
    Case("log-metric", 1, "calls/s", True, log_metric),
    Case("log-metric", 8, "calls/s", True, log_metric),
    Case("log-batch", 1, "metrics/s", True, log_batch),
    Case("log-batch", 4, "metrics/s", True, log_batch),
    Case("search", 1, "ms", False, search, reads=True),
    Case("search-first", 1, "ms", False, search_first, reads=True),
    Case("search-all", 1, "ms", False, search_all, reads=True),
    Case("get-history", 1, "s", False, history, reads=True),
    Case("get-run", 1, "ms", False, get_run, reads=True),
    Case("get-experiment", 1, "ms", False, get_experiment, reads=True),
    Case("find-experiment", 1, "ms", False, find_experiment, reads=True),
)
GOALS = {"mlflow": 15.0, "mlflow-1-worker": 15.0, "fasttrackml": 2.0}
"""Required ratio to these servers, in every case."""
START_GOAL = 1.5
"""Maximum seconds until ours is healthy."""
MEMORY_GOAL = 120.0
"""Maximum memory of our idle server in MB."""


def add_runs(client: Client, experiment: str, runs: int) -> str:
    """Create runs of 10 params, 10 metrics and 3 tags each. Returns the last id."""
    for number in range(runs):
        run = new_run(client, experiment)
        metrics = [{"key": f"m{k}", "value": number * 7919 % 2000 / 2000 + k, "timestamp": NOW} for k in range(10)]
        params = [{"key": f"p{k}", "value": f"v{number % 5}"} for k in range(10)]
        tags = [{"key": f"t{k}", "value": f"v{number % 7}"} for k in range(3)]
        client.json("POST", "runs/log-batch", {"run_id": run, "metrics": metrics, "params": params, "tags": tags})
    return run


def prepare_reads(server: Loaded, runs: int) -> None:
    """Create runs to search, and one with a long history."""
    client = Client(server.port)
    server.experiment = str(client.json("POST", "experiments/create", {"name": EXPERIMENT})["experiment_id"])
    server.small = add_runs(client, server.experiment, runs)
    server.run = new_run(client)
    for start in range(0, HISTORY, BATCH):
        part = [
            {"key": "loss", "value": random.random(), "timestamp": NOW + n, "step": n} for n in range(start, start + BATCH)
        ]
        client.json("POST", "runs/log-batch", {"run_id": server.run, "metrics": part})
    client.close()
