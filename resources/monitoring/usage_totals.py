"""The GPU hours of experiments: what their runs measured, summed (row E10)."""

from collections.abc import Collection, Mapping

from sqlalchemy import Connection, func, select

from resources.metadata.tables import latest_metrics, runs
from resources.metadata.totals import MEASURED_HOURS


def gpu_hours_of(reader: Connection, experiment_ids: Collection[int]) -> Mapping[int, float]:
    """Of all runs, deleted ones too: what they used was used. 0 where nothing was measured."""
    query = (
        select(runs.c.experiment_id, func.sum(latest_metrics.c.value))
        .join_from(runs, latest_metrics)
        .where(MEASURED_HOURS, runs.c.experiment_id.in_(experiment_ids))
        .group_by(runs.c.experiment_id)
    )
    return dict.fromkeys(experiment_ids, 0.0) | dict(reader.execute(query).tuples().all())
