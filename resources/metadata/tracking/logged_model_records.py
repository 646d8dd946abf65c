"""Metrics of logged models. They are written with the metrics of the run that measured them, in one transaction."""

from collections.abc import Sequence

from sqlalchemy import Connection, select

from resources.metadata.tables import logged_model_metrics, logged_models
from resources.metadata.tracking.logged_model_states import ModelMetric, no_model
from resources.metadata.tracking_rules import (
    MAX_DATASET_DIGEST,
    MAX_DATASET_NAME,
    MetricPoint,
    check_length,
    checked_text,
)
from resources.metadata.transactions import insert_into


def write_model_points(connection: Connection, run_id: str, points: Sequence[MetricPoint]) -> None:
    """Add those points of a run that name a model to what is known of the model. Sending one again changes nothing.

    Raises:
        HanzoError: RESOURCE_DOES_NOT_EXIST for a model that nobody created; the caller's transaction must not be committed.
    """
    measured = [point for point in points if point.model_id]
    if not measured:
        return
    for point in measured:
        check_length("dataset_name", checked_text(point.dataset_name, "dataset_name"), MAX_DATASET_NAME)
        check_length("dataset_digest", checked_text(point.dataset_digest, "dataset_digest"), MAX_DATASET_DIGEST)
    ids = sorted({checked_text(point.model_id, "model_id") for point in measured})
    known = set(connection.execute(select(logged_models.c.id).where(logged_models.c.id.in_(ids))).scalars())
    for model_id in ids:
        if model_id not in known:
            raise no_model(model_id)
    rows = [{"run_id": run_id, **point._asdict()} for point in measured]
    connection.execute(insert_into(connection, logged_model_metrics).on_conflict_do_nothing(), rows)


def load_model_points(reader: Connection, model_ids: Sequence[str]) -> dict[str, list[ModelMetric]]:
    """Every metric of each of a few hundred models, by key and in the order of steps."""
    columns = logged_model_metrics.c
    query = select(columns.run_id, *(columns[name] for name in MetricPoint._fields)).where(columns.model_id.in_(model_ids))
    loaded: dict[str, list[ModelMetric]] = {model_id: [] for model_id in model_ids}
    for run_id, *values in reader.execute(query.order_by(columns.key, columns.step, columns.timestamp, columns.run_id)):
        point = MetricPoint(*values)
        loaded[point.model_id].append(ModelMetric(run_id, point))
    return loaded
