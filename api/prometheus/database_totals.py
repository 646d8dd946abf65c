"""What the database knows, under the specification's names (rows V3-V5). Read when Prometheus asks."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from recipes.contracts.job import StoreAddress
from resources.compute.local import gpus
from resources.metadata.database import Database
from resources.monitoring.usage_totals import DURATION_BUCKETS, Durations, Labels, Totals, read_totals

log = logging.getLogger(__name__)

CACHE_SECONDS = 5.0
"""Several readers, or an impatient one, cost the database no more than one."""


class DatabaseTotals(Collector):
    """A collector without values while the database does not answer: a gap is true, an old number is not."""

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
        """Looked for once: a machine's GPUs do not change while it runs."""
        with self._lock:
            if self._gpus is None:
                self._gpus = gpus.by_type(gpus.installed(), self._gpu_types)
            return self._gpus

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering the collector must not need the database."""
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
    yield gauge("hanzo_ml_gpus_allocated", "GPUs that running jobs asked for", ["gpu_type"], totals.gpus_allocated)
    # Jobs are processes of this machine: description it has and no running job asked for is free.
    allocated = {labels[0]: count for labels, count in totals.gpus_allocated.items()}
    free: dict[Labels, float] = {(name,): count for name, count in gpus.free(installed, allocated).items()}
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
