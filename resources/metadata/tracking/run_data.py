"""Params, tags and metric batches that runs log, and MLflow 2's model history."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, select, update

from resources.errors import invalid, not_found
from resources.metadata.database import Database
from resources.metadata.field_rules import LOGGED_MODELS_TAG, NAME_TAG, MetricPoint, checked_text
from resources.metadata.tables import params, run_tags, runs
from resources.metadata.tracking.logged_model_records import write_model_points
from resources.metadata.tracking.run_revisions import bump_revision
from resources.metadata.transactions import insert_into, reading, writing
from resources.metadata.writes.group_commit import write_group
from resources.metadata.writes.write_decisions import MAX_PARAMS, RunWrite, check_run_active, run_not_found, run_write

# Params (immutable), tags (mutable), and batches of metrics, params and tags.

__all__ = ["MAX_PARAMS", "RunData", "check_run_active", "require_active", "write_tags"]


class RunData:
    """What runs log, in a database. Methods join the transaction of `connection` if given."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def log_batch(
        self,
        run_id: str,
        metrics: Sequence[MetricPoint] = (),
        params: Sequence[tuple[str, str]] = (),
        tags: Sequence[tuple[str, str]] = (),
        *,
        connection: Connection | None = None,
    ) -> None:
        """Log all of it or nothing (idempotent)."""
        self._write(run_write(run_id, metrics, params, tags), connection, metrics)

    def log_param(self, run_id: str, key: str, value: str, *, connection: Connection | None = None) -> None:
        self._write(run_write(run_id, params=[(key, value)], batch=False), connection)

    def log_metric(self, run_id: str, point: MetricPoint, *, connection: Connection | None = None) -> None:
        self._write(run_write(run_id, [point], batch=False), connection, [point])

    def set_tag(self, run_id: str, key: str, value: str, *, connection: Connection | None = None) -> None:
        self._write(run_write(run_id, tags=[(key, value)], batch=False), connection)

    def delete_tag(self, run_id: str, key: str, *, connection: Connection | None = None) -> None:
        with writing(self._database, connection) as writer:
            require_active(writer, run_id)
            bump_revision(writer, run_id)
            tag = (run_tags.c.run_id == run_id) & (run_tags.c.key == checked_text(key, "key"))
            if writer.execute(delete(run_tags).where(tag)).rowcount == 0:
                raise not_found(f"No tag with name: {key} in run with id {run_id}")

    def params(self, run_id: str, *, connection: Connection | None = None) -> dict[str, str]:
        query = select(params.c.key, params.c.value).where(params.c.run_id == run_id).order_by(params.c.key)
        with reading(self._database, connection) as reader:
            return {row.key: row.value for row in reader.execute(query)}

    def tags(self, run_id: str, *, connection: Connection | None = None) -> dict[str, str]:
        query = select(run_tags.c.key, run_tags.c.value).where(run_tags.c.run_id == run_id).order_by(run_tags.c.key)
        with reading(self._database, connection) as reader:
            return {row.key: row.value for row in reader.execute(query)}

    def _write(self, write: RunWrite, connection: Connection | None, metrics: Sequence[MetricPoint] = ()) -> None:
        with writing(self._database, connection) as writer:
            [refusal] = write_group(writer.connection, writer.dialect, [write])
            if refusal is not None:
                raise refusal
            write_model_points(writer, write.run_id, metrics)


def require_active(writer: Connection, run_id: str) -> None:
    """Raise unless the run exists and is not deleted; locks its row until the commit."""
    query = select(runs.c.lifecycle_stage).where(runs.c.id == checked_text(run_id, "run_id"))
    query = query.with_for_update(key_share=True)
    stage = writer.execute(query).scalar()
    if stage is None:
        raise run_not_found(run_id)
    check_run_active(run_id, stage)


def write_tags(writer: Connection, run_id: str, new: Mapping[str, str]) -> None:
    """Set tags, sorted by key to avoid deadlocks; the name tag also renames the run."""
    if not new:
        return
    bump_revision(writer, run_id)
    statement = insert_into(writer, run_tags)
    upsert = statement.on_conflict_do_update(index_elements=["run_id", "key"], set_={"value": statement.excluded.value})
    writer.execute(upsert, [{"run_id": run_id, "key": key, "value": new[key]} for key in sorted(new)])
    if new.get(NAME_TAG):
        writer.execute(update(runs).where(runs.c.id == run_id).values(name=new[NAME_TAG][:500]))


# The tag in which MLflow before version 3 stores a run's logged models: a growing JSON list.


class ModelHistory:
    """Model histories in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, run_id: str, entry: Mapping[str, Any]) -> None:
        """Append a model to a run's history; as in MLflow, the tag's length is unlimited."""
        stored = select(run_tags.c.value).where(run_tags.c.run_id == run_id, run_tags.c.key == LOGGED_MODELS_TAG)
        with self._database.write() as writer:
            # Locks the run's row, so that no other writer appends to the same list concurrently.
            require_active(writer, run_id)
            history = parse_history(run_id, writer.execute(stored).scalar())
            text = checked_text(json.dumps([*history, entry]), "model_json")
            write_tags(writer, run_id, {LOGGED_MODELS_TAG: text})


def parse_history(run_id: str, value: str | None) -> list[Any]:
    try:
        history = json.loads(value or "[]")
    except (ValueError, RecursionError):
        history = None
    if not isinstance(history, list):
        raise invalid(f"The tag {LOGGED_MODELS_TAG} of run {run_id} is not a list of models: delete it and log again")
    return history
