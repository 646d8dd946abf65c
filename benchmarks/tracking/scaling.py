"""Measure whether a call's cost depends on its result or on table sizes.

The same calls are repeated while runs and points grow step by step. One experiment is constant, another grows. Runs are
written by the product's own writer, the points of their long series by the database itself, because 50 million requests
would take a day; reads are unaffected by that.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text

from benchmarks.tracking.load_generator import API, Call, Client, latencies, median
from benchmarks.tracking.servers import Place, Server
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.tracking.tracking import Tracking
from resources.metadata.writes.group_commit import write_group
from resources.metadata.writes.write_decisions import run_write

NOW = 1_700_000_000_000
SMALL = 500
"""Runs of the constant experiment."""
FRACTIONS = (0.1, 0.25, 0.5, 1.0)
GROUP = 100
"""Runs in one transaction."""

_LENGTHEN = {
    "sqlite": """WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :points - 1)
        INSERT INTO metrics (series, step, timestamp, value, is_nan)
        SELECT id, n, :now + n, 1.0 / n, 0
        FROM (SELECT id FROM latest_metrics WHERE key = 'loss' AND id > :last ORDER BY id) CROSS JOIN numbers""",
    "postgresql": """INSERT INTO metrics (series, step, timestamp, value, is_nan)
        SELECT id, n, :now + n, 1.0 / n, false
        FROM (SELECT id FROM latest_metrics WHERE key = 'loss' AND id > :last ORDER BY id) AS series
        CROSS JOIN generate_series(1, CAST(:points AS integer) - 1) AS n""",
}
_MOVE = """UPDATE latest_metrics SET step = :points - 1, timestamp = :now + :points - 1, value = 1.0 / (:points - 1)
    WHERE key = 'loss' AND id > :last"""


@dataclass(frozen=True)
class Asked:
    """A call that is measured at each step."""

    name: str
    call: Call


def measure_scale(place: Place, start: Callable[[], Server], runs: int, points: int, seconds: float) -> None:
    """Print the latency and server processor time (without PostgreSQL's) of each call."""
    database = Database(place.database)
    database.migrate()
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    small, growing = (tracking.experiments.create(name, "default").id for name in ("small", "growing"))
    each = max(2, points // runs)
    made = 0
    server = start()
    try:
        for target in sorted({SMALL, *(max(SMALL, int(runs * fraction)) for fraction in FRACTIONS)}):
            began = time.perf_counter()
            experiment = small if made == 0 else growing
            for first in range(made, target, GROUP):
                last = last_series(database)
                add_runs(tracking, experiment, range(first, min(first + GROUP, target)))
                lengthen(database, each, last)
            made = target
            settle(database)
            print(f"  {made:,} runs, {made * each:,} points (loaded in {time.perf_counter() - began:.0f} s)", flush=True)
            for asked in questions(place.port, small, growing if made > SMALL else small):
                before = server.processor_seconds()
                taken = sorted(latencies(place.port, 1, seconds, lambda *_, call=asked.call: call))
                used = (server.processor_seconds() - before) / len(taken)
                shown = {"p50": median(taken), "p95": taken[int(len(taken) * 0.95)], "processor": used}
                figures = "   ".join(f"{name} {figure * 1000:8.2f} ms" for name, figure in shown.items())
                print(f"    {asked.name:58} {figures}", flush=True)
    finally:
        server.stop()
        database.close()


def add_runs(tracking: Tracking, experiment: int, numbers: range) -> None:
    """Add runs of ten params, ten metrics and three tags."""
    with tracking.write() as writer:
        writes = []
        for number in numbers:
            run = tracking.runs.create(experiment, start_time=NOW + number, connection=writer)
            metrics = [metric_point(f"m{k}", number * 7919 % 2000 / 2000 + k, 0, NOW) for k in range(9)]
            params = [(f"p{k}", f"v{number % (50 if k == 0 else 5)}") for k in range(10)]
            tags = [(f"t{k}", f"v{number % 7}") for k in range(3)]
            writes.append(run_write(run.id, [*metrics, metric_point("loss", 1.0, 0, NOW)], params, tags))
        write_group(writer.connection, writer.dialect, writes)


def lengthen(database: Database, points: int, last: int) -> None:
    """Add points to the series after `last`."""
    with database.write() as writer:
        values = {"points": points, "now": NOW, "last": last}
        writer.execute(text(_LENGTHEN[writer.dialect.name]), values)
        writer.execute(text(_MOVE), values)


def last_series(database: Database) -> int:
    with database.read() as reader:
        return int(reader.execute(text("SELECT max(id) FROM latest_metrics")).scalar() or 0)


def settle(database: Database) -> None:
    """Update PostgreSQL's planner statistics, as it would by itself within a minute."""
    if database.engine.dialect.name == "postgresql":
        with database.read() as connection:
            connection.execute(text("VACUUM ANALYZE"))


def questions(port: int, small: int, growing: int) -> Iterator[Asked]:
    ordered = {"order_by": ["metrics.m3 DESC"], "max_results": 100}
    yield Asked("constant experiment: a page, filtered and ordered", search(small, "params.p1 = 'v3'", ordered))
    yield Asked("growing experiment: the newest page", search(growing, "", {"max_results": 100}))
    yield Asked("growing experiment: one run in 50, ordered", search(growing, "params.p0 = 'v3'", ordered))
    yield Asked("growing experiment: half of it by metric, ordered", search(growing, "metrics.m2 > 2.5", ordered))
    client = Client(port)
    newest = client.json("POST", "runs/search", {"experiment_ids": [str(growing)], "max_results": 1})["runs"][0]
    client.close()
    history = f"{API}metrics/get-history?run_id={newest['info']['run_id']}&metric_key=loss"
    yield Asked("a page of 1,000 points of a history", ("GET", f"{history}&max_results=1000", b""))


def search(experiment: int, filter: str, more: dict[str, Any]) -> Call:
    body = {"experiment_ids": [str(experiment)], "filter": filter, **more}
    return "POST", API + "runs/search", json.dumps(body).encode()
