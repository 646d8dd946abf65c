"""Create, update and delete runs; each state change writes its event in its transaction.

Elsewhere: a run's states (`run_states`), what it logs (`run_data`, `metrics`), and search (`run_search`).
"""

import uuid
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, select, update

from resources.errors import already_exists, not_found
from resources.metadata.artifacts.locations import run_files_uri
from resources.metadata.database import Database
from resources.metadata.field_rules import (
    MAX_USER,
    NAME_TAG,
    check_length,
    checked_creation_tag,
    checked_run_id,
    checked_text,
    checked_time,
)
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import runs
from resources.metadata.tracking.experiments import Experiments, check_active
from resources.metadata.tracking.run_data import check_run_active, write_tags
from resources.metadata.tracking.run_revisions import new_revision
from resources.metadata.tracking.run_states import Run, checked_run_name, checked_status, choose_name, status_change
from resources.metadata.transactions import Statement, insert_into, parameter, reading, writing

_BY_ID = Statement(select(*(runs.c[field.name] for field in fields(Run))).where(runs.c.id == parameter("id")))


class Runs:
    """Runs in a database. Methods join the transaction of `connection` if given."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._experiments = Experiments(database)

    def create(
        self,
        experiment_id: int,
        *,
        run_id: str | None = None,
        may_exist: bool = False,
        name: str | None = None,
        user_id: str = "",
        tags: Mapping[str, str] | None = None,
        status: str = "running",
        start_time: int | None = None,
        connection: Connection | None = None,
    ) -> Run:
        """Create a run in the experiment's organization.

        If `run_id` exists, return that run unchanged with `may_exist`, else raise `already_exists`.
        """
        identifier = checked_run_id(run_id) if run_id is not None else uuid.uuid4().hex
        with writing(self._database, connection) as writer:
            created = self._insert(writer, experiment_id, identifier, name, user_id, tags or {}, status, start_time)
            if created is None and may_exist:
                return _get(writer, identifier)
            if created is None:
                raise already_exists(f"Run with id={identifier} already exists")
            return created

    def ensure(
        self,
        run_id: str,
        experiment_name: str,
        run_name: str,
        user: str,
        organization: str,
        tags: Mapping[str, str] | None = None,
        *,
        status: str = "queued",
        connection: Connection | None = None,
    ) -> Run:
        """Return the run with this id; if missing, create it and its experiment."""
        checked_run_id(run_id)
        with writing(self._database, connection) as writer:
            found = _find(writer, run_id)
            if found is not None:
                return found
            experiment = self._experiments.ensure(experiment_name, organization, connection=writer)
            created = self._insert(writer, experiment.id, run_id, run_name, user, tags or {}, status, None)
            return created if created is not None else _get(writer, run_id)

    def get(self, run_id: str, *, connection: Connection | None = None) -> Run:
        with reading(self._database, connection) as reader:
            return _get(reader, run_id)

    def set_status(
        self, run_id: str, status: str, *, end_time: int | None = None, connection: Connection | None = None
    ) -> Run:
        """Move a run to one of `STATUSES`; no event if it is there already.

        Without `end_time`, a run that ends does so now, and a run that resumes has none.
        """
        checked_time(end_time, "end_time")
        with writing(self._database, connection) as writer:
            run = _get(writer, run_id)
            check_run_active(run.id, run.lifecycle_stage)
            return self._change(writer, run, status_change(run, status, end_time))

    def follow_job(self, run_id: str, status: str, connection: Connection) -> Run:
        """Set the status of a job's run, even if the run is deleted."""
        run = _get(connection, run_id)
        return self._change(connection, run, status_change(run, status, None))

    def update(
        self,
        run_id: str,
        *,
        status: str | None = None,
        end_time: int | None = None,
        name: str | None = None,
        connection: Connection | None = None,
    ) -> Run:
        """Change only the given values: MLflow's clients set the end time themselves."""
        checked_time(end_time, "end_time")
        with writing(self._database, connection) as writer:
            run = _get(writer, run_id)
            check_run_active(run.id, run.lifecycle_stage)
            values: dict[str, Any] = {} if end_time is None else {"end_time": end_time}
            if status is not None:
                values["status"] = checked_status(status)
            if name:
                values["name"] = checked_run_name(name)
                write_tags(writer, run_id, {NAME_TAG: name})
            return self._change(writer, run, values)

    def delete(self, run_id: str, *, connection: Connection | None = None) -> None:
        """Hide a run and refuse further writes, until it is restored."""
        with writing(self._database, connection) as writer:
            self._change(writer, _get(writer, run_id), {"lifecycle_stage": "deleted"})

    def restore(self, run_id: str, *, connection: Connection | None = None) -> None:
        with writing(self._database, connection) as writer:
            self._change(writer, _get(writer, run_id), {"lifecycle_stage": "active"})

    def _insert(
        self,
        writer: Connection,
        experiment_id: int,
        run_id: str,
        name: str | None,
        user_id: str,
        tags: Mapping[str, str],
        status: str,
        start_time: int | None,
    ) -> Run | None:
        """Insert a run; return None if one with that id exists."""
        experiment = self._experiments.get(experiment_id, connection=writer)
        check_active(experiment)
        check_length("user_id", checked_text(user_id, "user_id"), MAX_USER)
        checked_tags = dict(checked_creation_tag(key, value, f"tags.{key}") for key, value in tags.items())
        run = Run(
            id=run_id,
            experiment_id=experiment_id,
            name=choose_name(name, checked_tags.get(NAME_TAG)),
            status=checked_status(status),
            start_time=now_ms() if start_time is None else checked_time(start_time, "start_time"),
            end_time=None,
            user_id=user_id,
            organization=experiment.organization,
            artifact_uri=run_files_uri(experiment.artifact_location, run_id),
            lifecycle_stage="active",
            revision=new_revision(),
        )
        row = insert_into(writer, runs).values(**vars(run)).on_conflict_do_nothing()
        if writer.execute(row.returning(runs.c.id)).first() is None:
            return None
        write_tags(writer, run_id, {**checked_tags, NAME_TAG: run.name})
        emit(writer, "jobs", "run.created", run_id, _event(run))
        return run

    @staticmethod
    def _change(writer: Connection, run: Run, values: Mapping[str, Any]) -> Run:
        changed = Run(**{**vars(run), **values})
        if changed == run:
            return run
        writer.execute(update(runs).where(runs.c.id == run.id).values(**values))
        emit(writer, "jobs", "run.updated", run.id, {**_event(changed), "previous_status": run.status})
        return changed


def _event(run: Run) -> dict[str, Any]:
    names = ("experiment_id", "name", "status", "user_id", "organization", "lifecycle_stage")
    return {"run_id": run.id, **{name: getattr(run, name) for name in names}}


def _find(reader: Connection, run_id: str) -> Run | None:
    row = _BY_ID.first(reader, id=checked_text(run_id, "run_id"))
    return None if row is None else Run(*row)


def _get(reader: Connection, run_id: str) -> Run:
    found = _find(reader, run_id)
    if found is None:
        raise not_found(f"Run with id={run_id} not found")
    return found
