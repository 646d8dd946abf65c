"""Experiments: named groups of runs, with tags and a lifecycle stage (active or deleted)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from resources.errors import ErrorCode, HanzoError, already_exists, invalid, not_found
from resources.metadata.artifacts.locations import checked_location, default_location
from resources.metadata.database import Database
from resources.metadata.field_rules import MAX_INT64, checked_experiment_name, checked_experiment_tag, checked_text
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import experiment_tags, experiments, runs
from resources.metadata.transactions import Row, Statement, insert_into, parameter, reading, writing

DEFAULT_ID = 0
DEFAULT_NAME = "Default"
DEFAULT_ORGANIZATION = "default"
"""The organization in embedded mode, which has no sign-in."""


@dataclass(frozen=True)
class Experiment:
    id: int
    name: str
    organization: str
    artifact_location: str
    lifecycle_stage: str
    creation_time: int
    last_update_time: int
    tags: Mapping[str, str] = field(default_factory=dict)


_COLUMNS = [experiments.c[field.name] for field in fields(Experiment) if field.name != "tags"]
# One row per tag, or one without: repeating the columns is cheaper than a second statement.
_FOUND = select(*_COLUMNS, experiment_tags.c.key, experiment_tags.c.value).outerjoin_from(experiments, experiment_tags)
_BY_ID = Statement(_FOUND.where(experiments.c.id == parameter("id")))
_BY_NAME = Statement(
    _FOUND.where(experiments.c.name == parameter("name"), experiments.c.organization == parameter("organization"))
)


class Experiments:
    """Experiments in a database. Methods join the transaction of `connection` if given."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure_default(self, *, connection: Connection | None = None) -> None:
        """Create experiment 0, to which MLflow's clients log by default, if it is missing."""
        with reading(self._database, connection) as reader:
            if reader.execute(select(experiments.c.id).where(experiments.c.id == DEFAULT_ID)).first():
                return
        with writing(self._database, connection) as writer:
            row = _row(DEFAULT_NAME, DEFAULT_ORGANIZATION, default_location(DEFAULT_ID))
            writer.execute(insert_into(writer, experiments).values(id=DEFAULT_ID, **row).on_conflict_do_nothing())

    def create(
        self,
        name: str,
        organization: str,
        *,
        artifact_location: str = "",
        tags: Mapping[str, str] | None = None,
        connection: Connection | None = None,
    ) -> Experiment:
        checked_experiment_name(name)
        location = checked_location(artifact_location)
        checked = dict(checked_experiment_tag(key, value) for key, value in (tags or {}).items())
        try:
            with writing(self._database, connection) as writer, writer.begin_nested():
                identifier = _insert(writer, name, organization, location)
                if checked:
                    rows = [{"experiment_id": identifier, "key": key, "value": checked[key]} for key in sorted(checked)]
                    writer.execute(insert(experiment_tags), rows)
                return _get(writer, identifier)
        except IntegrityError:
            raise already_exists(f"Experiment(name={name}) already exists.") from None

    def ensure(self, name: str, organization: str, *, connection: Connection | None = None) -> Experiment:
        """Return the active experiment of that name, created if missing (safe against races)."""
        with writing(self._database, connection) as writer:
            found = self.find(name, organization, connection=writer)
            if found is None:
                try:
                    return self.create(name, organization, connection=writer)
                except HanzoError as error:
                    if error.code is not ErrorCode.RESOURCE_ALREADY_EXISTS:
                        raise
                    found = self.get_by_name(name, organization, connection=writer)
            check_active(found)
            return found

    def get(self, experiment_id: int, *, connection: Connection | None = None) -> Experiment:
        with reading(self._database, connection) as reader:
            return _get(reader, experiment_id)

    def find(self, name: str, organization: str, *, connection: Connection | None = None) -> Experiment | None:
        with reading(self._database, connection) as reader:
            return _experiment(_BY_NAME.rows(reader, name=name, organization=organization))

    def get_by_name(self, name: str, organization: str, *, connection: Connection | None = None) -> Experiment:
        found = self.find(checked_text(name, "experiment_name"), organization, connection=connection)
        if found is None:
            raise not_found(f"Could not find experiment with name '{name}'")
        return found

    def rename(self, experiment_id: int, new_name: str, *, connection: Connection | None = None) -> None:
        checked_experiment_name(new_name)
        try:
            with writing(self._database, connection) as writer, writer.begin_nested():
                if _get(writer, experiment_id).lifecycle_stage != "active":
                    raise HanzoError(ErrorCode.INVALID_STATE, "Cannot rename a non-active experiment.")
                _change(writer, experiment_id, name=new_name)
        except IntegrityError:
            raise already_exists(f"Experiment(name={new_name}) already exists.") from None

    def delete(self, experiment_id: int, *, connection: Connection | None = None) -> None:
        """Hide an experiment and its runs, and refuse further writes, until it is restored."""
        self._set_lifecycle(experiment_id, "active", "deleted", connection)

    def restore(self, experiment_id: int, *, connection: Connection | None = None) -> None:
        self._set_lifecycle(experiment_id, "deleted", "active", connection)

    def set_tag(self, experiment_id: int, key: str, value: str, *, connection: Connection | None = None) -> None:
        """Set a tag. As in MLflow, this does not change `last_update_time`."""
        checked_experiment_tag(key, value)
        with writing(self._database, connection) as writer:
            check_active(_get(writer, experiment_id))
            row = insert_into(writer, experiment_tags).values(experiment_id=experiment_id, key=key, value=value)
            writer.execute(row.on_conflict_do_update(index_elements=["experiment_id", "key"], set_={"value": value}))

    def delete_tag(self, experiment_id: int, key: str, *, connection: Connection | None = None) -> None:
        tag = (experiment_tags.c.experiment_id == experiment_id) & (experiment_tags.c.key == checked_text(key, "key"))
        with writing(self._database, connection) as writer:
            check_active(_get(writer, experiment_id))
            if writer.execute(delete(experiment_tags).where(tag)).rowcount == 0:
                raise not_found(f"No tag with name: {key} in experiment with id {experiment_id}")

    def _set_lifecycle(self, experiment_id: int, old: str, new: str, connection: Connection | None) -> None:
        """Change the stage of an experiment and all of its runs.

        As in MLflow, restoring also restores runs that were deleted individually before.
        """
        with writing(self._database, connection) as writer:
            experiment = _get(writer, experiment_id)
            if experiment.lifecycle_stage != old:
                raise not_found(f"No Experiment with id={experiment_id} exists that is {old}")
            _change(writer, experiment_id, lifecycle_stage=new)
            writer.execute(update(runs).where(runs.c.experiment_id == experiment_id).values(lifecycle_stage=new))
            # One event for all runs, of which there may be a hundred thousand.
            facts = {"experiment_id": experiment_id, "name": experiment.name, "organization": experiment.organization}
            event = {"deleted": "experiment.deleted", "active": "experiment.restored"}[new]
            emit(writer, "jobs", event, str(experiment_id), facts)


def check_active(experiment: Experiment) -> None:
    if experiment.lifecycle_stage != "active":
        raise invalid(
            f"The experiment {experiment.id} must be in the 'active' state. Current state is {experiment.lifecycle_stage}."
        )


def _insert(writer: Connection, name: str, organization: str, location: str) -> int:
    row = insert(experiments).values(_row(name, organization, location)).returning(experiments.c.id)
    identifier: int = writer.execute(row).scalar_one()
    if not location:
        own = update(experiments).where(experiments.c.id == identifier)
        writer.execute(own.values(artifact_location=default_location(identifier)))
    return identifier


def _row(name: str, organization: str, location: str) -> dict[str, Any]:
    now = now_ms()
    return {
        "name": name,
        "organization": organization,
        "artifact_location": location,
        "lifecycle_stage": "active",
        "creation_time": now,
        "last_update_time": now,
    }


def _get(reader: Connection, experiment_id: int) -> Experiment:
    found = _experiment(_BY_ID.rows(reader, id=experiment_id)) if abs(experiment_id) <= MAX_INT64 else None
    if found is None:
        raise not_found(f"No Experiment with id={experiment_id} exists")
    return found


def _experiment(rows: Sequence[Row]) -> Experiment | None:
    """Build an experiment from the rows of `_FOUND`."""
    if not rows:
        return None
    tags: dict[str, str] = {key: value for *_, key, value in rows if key is not None}
    return Experiment(*rows[0][:-2], tags)  # type: ignore[call-arg]  # the columns are all fields but tags


def _change(writer: Connection, experiment_id: int, **values: str) -> None:
    changed = update(experiments).where(experiments.c.id == experiment_id)
    writer.execute(changed.values(last_update_time=now_ms(), **values))
