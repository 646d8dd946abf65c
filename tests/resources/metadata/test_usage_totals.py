"""GPU hours as the control plane meters them."""

import pytest

from resources.metadata.database import Database
from resources.metadata.field_rules import MetricPoint
from resources.metadata.jobs import Jobs
from resources.metadata.tracking.tracking import Tracking
from resources.monitoring.usage_totals import read_totals, sum_gpu_hours_by_experiment, sum_run_gpu_hours
from tests.support.metered_gpus import meter_attempt

HOURS_METRIC = "system/total_gpu_hours"


@pytest.mark.requirement("Y4")
def test_gpu_hours_are_the_hours_that_attempts_held_gpus(database: Database) -> None:
    tracking, jobs = Tracking(database), Jobs(database)
    for name, experiment in (("a", "dear"), ("b", "dear"), ("c", "cheap")):
        jobs.submit(name=name, config={}, user="ann", organization="acme", id=name, experiment=experiment)
    meter_attempt(database, "a", 0.5, gpus=2, gpu_type="nvidia-h100-80gb")
    meter_attempt(database, "a", 1.5, gpus=2, gpu_type="nvidia-h100-80gb")  # restarted
    tracking.runs.delete("b")
    meter_attempt(database, "b", 2.0, gpu_type="nvidia-h100-80gb")
    meter_attempt(database, "c", 0.25)
    dear, cheap = (tracking.runs.get(job).experiment_id for job in ("a", "c"))
    with database.read() as connection:
        assert sum_gpu_hours_by_experiment(connection, [dear, cheap, 0]) == {dear: 6.0, cheap: 0.25, 0: 0.0}
        assert sum_gpu_hours_by_experiment(connection, []) == {}
        assert (sum_run_gpu_hours(connection, "a"), sum_run_gpu_hours(connection, "none")) == (4.0, None)
        hours = read_totals(connection).gpu_hours
    assert hours == {("nvidia-h100-80gb", "acme"): 6.0, ("unknown", "acme"): 0.25}


def test_gpu_hours_logged_as_a_metric_are_not_counted(database: Database) -> None:
    tracking = Tracking(database)
    experiment = tracking.experiments.create("boast", "acme").id
    run = tracking.runs.create(experiment).id
    tracking.run_data.log_metric(run, MetricPoint(HOURS_METRIC, 1e6, 0, 1))
    with database.read() as connection:
        assert sum_gpu_hours_by_experiment(connection, [experiment]) == {experiment: 0.0}
        assert read_totals(connection).gpu_hours == {}
    assert {point.key for point in tracking.run_search.get(tracking.runs.get(run)).metrics} == {HOURS_METRIC}
