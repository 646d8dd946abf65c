"""The Prometheus page of database contents: names, labels, limits and values."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from api.prometheus import metric_families
from resources.monitoring.usage_totals import DURATION_BUCKETS, Durations, Totals

TOTALS = Totals(
    jobs={("training", "failed", "acme"): 2.0},
    gpu_hours={("nvidia-h100-80gb", "acme"): 2.5},
    datasets={("acme",): 3.0},
    models={("acme",): 4.0},
    durations={"training": Durations([0, 1, *[2] * (len(DURATION_BUCKETS) - 2)], 3, 300_100.0)},
    running={("training", "acme"): 1.0},
    gpus_allocated={("nvidia-h100-80gb",): 32.0},
    queued={("acme", "high"): 5.0},
    stored_bytes={"datasets": 7.0},
)


class TotalsCollector(Collector):
    def collect(self) -> list[Metric]:
        return [*metric_families(TOTALS, {"datasets": "hanzo-datasets"}, {"nvidia-h100-80gb": 40})]


@pytest.mark.requirement("V3", "V4", "V5")
def test_metrics_page_has_the_values_from_the_database() -> None:
    registry = CollectorRegistry()
    registry.register(TotalsCollector())
    page = generate_latest(registry).decode()
    lines = {line for line in page.splitlines() if not line.startswith("#")}
    assert {
        'hanzo_ml_jobs_total{org="acme",status="failed",type="training"} 2.0',
        'hanzo_ml_gpu_hours_total{gpu_type="nvidia-h100-80gb",org="acme"} 2.5',
        'hanzo_ml_datasets_created_total{org="acme"} 3.0',
        'hanzo_ml_models_registered_total{org="acme"} 4.0',
        'hanzo_ml_jobs_running{org="acme",type="training"} 1.0',
        'hanzo_ml_gpus_allocated{gpu_type="nvidia-h100-80gb"} 32.0',
        'hanzo_ml_gpus_available{gpu_type="nvidia-h100-80gb"} 8.0',
        'hanzo_ml_queue_depth{org="acme",priority="high"} 5.0',
        'hanzo_ml_storage_bytes{bucket="hanzo-datasets"} 7.0',
        'hanzo_ml_job_duration_seconds_count{type="training"} 3.0',
        'hanzo_ml_job_duration_seconds_sum{type="training"} 300100.0',
        'hanzo_ml_job_duration_seconds_bucket{le="10.0",type="training"} 0.0',
        'hanzo_ml_job_duration_seconds_bucket{le="60.0",type="training"} 1.0',
        'hanzo_ml_job_duration_seconds_bucket{le="300.0",type="training"} 2.0',
        'hanzo_ml_job_duration_seconds_bucket{le="+Inf",type="training"} 3.0',
    } <= lines
