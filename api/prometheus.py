"""Prometheus metrics of requests and of the database, on a port of their own."""

import logging
import mmap
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from socket import socket

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.route_matching import UNMATCHED, Routes
from api.middleware.browser_security import LOOPBACK_NAMES, host_name
from recipes.contracts.job import StoreAddress
from resources.compute.local import capacity
from resources.metadata.database import Database
from resources.monitoring.usage_totals import DURATION_BUCKETS, Durations, Labels, Totals, read_totals

# Request durations by route.

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds; one more bucket is unbounded."""
CELLS_PER_ENDPOINT = len(BUCKETS) + 2
"""Per endpoint: the count of each bucket, and the sum of seconds."""
BUCKET_LABELS = [*map(floatToGoString, BUCKETS), "+Inf"]


class RequestHistogram(Collector):
    """Request durations by endpoint, in memory shared by all workers.

    Create it before the workers are forked; each calls `count_as` with its index first.
    """

    def __init__(self, endpoints: Iterable[str], workers: int) -> None:
        self._offsets = {endpoint: index * CELLS_PER_ENDPOINT for index, endpoint in enumerate(sorted(set(endpoints)))}
        self._size = len(self._offsets) * CELLS_PER_ENDPOINT
        self._cells = memoryview(mmap.mmap(-1, workers * self._size * 8)).cast("d")
        self._worker_cells = self._cells[: self._size]

    def count_as(self, worker: int) -> None:
        """Count as this worker from now on; only one thread of one process may."""
        self._worker_cells = self._cells[worker * self._size : (worker + 1) * self._size]

    def observe(self, endpoint: str, seconds: float) -> None:
        start = self._offsets[endpoint]
        self._worker_cells[start + bisect_left(BUCKETS, seconds)] += 1
        self._worker_cells[start + CELLS_PER_ENDPOINT - 1] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the endpoints that were called."""
        family = HistogramMetricFamily(
            "hanzo_ml_api_request_duration_seconds",
            "Time until a response begins, by route template",
            labels=["endpoint"],
        )
        for endpoint, start in self._offsets.items():
            parts = [self._cells[first : first + CELLS_PER_ENDPOINT] for first in range(start, len(self._cells), self._size)]
            *counts, total = (sum(cells) for cells in zip(*parts, strict=True))
            if any(counts):
                family.add_metric([endpoint], list(zip(BUCKET_LABELS, accumulate(counts), strict=True)), total)
        yield family


class RequestTiming:
    """ASGI middleware: observe the time until a response begins.

    The time to its end says nothing: a followed log never ends.
    """

    def __init__(self, app: ASGIApp, routes: Routes, histogram: RequestHistogram) -> None:
        self._app = app
        self._routes = routes
        self._histogram = histogram

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                match = self._routes.match(scope["method"], scope["path"])
                # HEAD is answered by the route of GET (`request_normalization`).
                if match is None and scope["method"] == "HEAD":
                    match = self._routes.match("GET", scope["path"])
                endpoint = match.route.template if match else UNMATCHED
                self._histogram.observe(endpoint, time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, timed)


# Totals from the database, under the specification's metric names. Read on each scrape.

log = logging.getLogger(__name__)

CACHE_SECONDS = 5.0
"""Several scrapers, or a very frequent one, cost the database no more than one."""


class DatabaseTotals(Collector):
    """Collects totals; none while the database is unavailable: a gap beats an outdated value."""

    def __init__(self, database: Database, store: StoreAddress, gpu_types: Sequence[str]) -> None:
        self._database = database
        self._gpu_types = gpu_types
        self._gpus: Mapping[str, int] | None = None
        self._buckets = store.buckets
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._totals: Totals | None = None

    def collect(self) -> Iterator[Metric]:
        totals = self._cached_totals()
        if totals is not None:
            yield from metric_families(totals, self._buckets, self._installed_gpus())

    def _installed_gpus(self) -> Mapping[str, int]:
        """Return the machine's GPUs, detected once: they do not change while it runs."""
        with self._lock:
            if self._gpus is None:
                self._gpus = capacity.count_by_type(capacity.installed_gpus(), self._gpu_types)
            return self._gpus

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: registering the collector must not need the database."""
        return iter(())

    def _cached_totals(self) -> Totals | None:
        with self._lock:
            if time.monotonic() - self._read_at > CACHE_SECONDS:
                try:
                    with self._database.read() as connection:
                        self._totals = read_totals(connection)
                except (SQLAlchemyError, OSError) as error:
                    log.warning("no totals for Prometheus: the database does not answer (%s)", type(error).__name__)
                    self._totals = None
                self._read_at = time.monotonic()
            return self._totals


def metric_families(totals: Totals, buckets: Mapping[str, str], installed: Mapping[str, int]) -> Iterator[Metric]:
    yield counter("hanzo_ml_jobs", "Jobs that reached a status", ["type", "status", "org"], totals.jobs)
    yield counter("hanzo_ml_gpu_hours", "GPU hours consumed", ["gpu_type", "org"], totals.gpu_hours)
    yield counter("hanzo_ml_datasets_created", "Dataset versions created", ["org"], totals.datasets)
    yield counter("hanzo_ml_models_registered", "Model versions registered", ["org"], totals.models)
    yield histogram("hanzo_ml_job_duration_seconds", "From start to end of a job", totals.durations)
    yield gauge("hanzo_ml_jobs_running", "Jobs that run", ["type", "org"], totals.running)
    yield gauge("hanzo_ml_gpus_allocated", "GPUs that running jobs hold", ["gpu_type"], totals.gpus_allocated)
    # Jobs are processes of this machine: GPUs that no running job holds are free.
    allocated = {labels[0]: count for labels, count in totals.gpus_allocated.items()}
    free: dict[Labels, float] = {(name,): count for name, count in capacity.free_gpus(installed, allocated).items()}
    yield gauge("hanzo_ml_gpus_available", "GPUs that are free", ["gpu_type"], free)
    yield gauge("hanzo_ml_queue_depth", "Jobs that wait", ["org", "priority"], totals.queued)
    stored: dict[Labels, float] = {(buckets[bucket],): size for bucket, size in totals.stored_bytes.items()}
    yield gauge("hanzo_ml_storage_bytes", "Bytes of recorded artifacts", ["bucket"], stored)


def counter(name: str, description: str, labels: list[str], values: Mapping[Labels, float]) -> Metric:
    family = CounterMetricFamily(name, description, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def gauge(name: str, description: str, labels: list[str], values: Mapping[Labels, float]) -> Metric:
    family = GaugeMetricFamily(name, description, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def histogram(name: str, description: str, values: Mapping[str, Durations]) -> Metric:
    family = HistogramMetricFamily(name, description, labels=["type"])
    for kind, durations in values.items():
        limits = [*(str(float(limit)) for limit in DURATION_BUCKETS), "+Inf"]
        counts = [float(count) for count in (*durations.within, durations.count)]
        family.add_metric([kind], list(zip(limits, counts, strict=True)), durations.seconds)
    return family


# The metrics page: its own listener and thread, so that a slow scrape delays no request.


@contextmanager
def serve_metrics_page(listener: socket, registry: CollectorRegistry, path: str, any_host: bool) -> Iterator[None]:
    """Serve the page on a listening socket until the block ends.

    On loopback (`any_host` false), requests must use a loopback host name.
    """

    class Page(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if not any_host and host_name(f"//{self.headers.get('Host', '')}") not in LOOPBACK_NAMES:
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path.partition("?")[0] != path:
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                page = generate_latest(registry)
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", CONTENT_TYPE_LATEST)
                self.send_header("Content-Length", str(len(page)))
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(page)

        def version_string(self) -> str:
            return "hanzo-ml"

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: every scrape would be noise."""

    server = ThreadingHTTPServer(listener.getsockname()[:2], Page, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="prometheus", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
