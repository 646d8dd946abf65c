"""GPU hours of experiments: the newest value of each run, summed."""

import math

from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.tracking.tracking import Tracking
from resources.monitoring.usage_totals import sum_gpu_hours_by_experiment


def test_the_newest_hours_of_each_run_are_summed_by_experiment(database: Database) -> None:
    tracking = Tracking(database)
    dear, cheap, unused = (tracking.experiments.create(name, "acme").id for name in ("dear", "cheap", "unused"))

    def run(experiment: int, key: str, *values: float) -> str:
        made = tracking.runs.create(experiment).id
        tracking.run_data.log_batch(made, [metric_point(key, value, step, step) for step, value in enumerate(values)])
        return made

    key = "system/total_gpu_hours"
    run(dear, key, 1.0, 2.5)
    tracking.runs.delete(run(dear, key, 4.0))
    run(dear, "train/loss", 100.0)
    run(cheap, key, 0.25)
    for _ in range(2):  # their sum is no double
        run(cheap, key, math.inf)
    run(cheap, key, math.nan)
    with database.read() as connection:
        assert sum_gpu_hours_by_experiment(connection, [dear, cheap, unused]) == {dear: 6.5, cheap: 0.25, unused: 0.0}
        assert sum_gpu_hours_by_experiment(connection, []) == {}
