"""Create, update and delete logged models; each state change writes its event in its transaction.

Elsewhere: records and metrics (`logged_model_records`), search (`logged_model_search`), which run created or read a model
(`run_inputs`), and its files.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from resources.errors import invalid, not_found
from resources.metadata.artifacts.locations import model_files_uri
from resources.metadata.database import Database
from resources.metadata.field_rules import check_length, checked_text, printable
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import logged_model_params, logged_model_tags, logged_models, model_versions
from resources.metadata.tracking.experiments import Experiment, Experiments, check_active
from resources.metadata.tracking.logged_model_records import (
    MAX_TYPE,
    STATUSES,
    LoggedModel,
    ModelDetails,
    Registration,
    checked_model_name,
    checked_pair,
    load_model_points,
    logged_model_not_found,
)
from resources.metadata.tracking.run_data import require_active
from resources.metadata.tracking.run_inputs import write_run_models
from resources.metadata.tracking.run_states import generate_name
from resources.metadata.transactions import insert_into


class LoggedModels:
    """Logged models in a database. Each method is a separate transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._experiments = Experiments(database)

    def create(
        self,
        experiment_id: int,
        *,
        name: str = "",
        model_type: str = "",
        source_run_id: str = "",
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> ModelDetails:
        """Create a `pending` model, which waits for its files. The default name is generated."""
        checked_model_name(name)
        check_length("model_type", checked_text(model_type, "model_type"), MAX_TYPE)
        check_length("source_run_id", checked_text(source_run_id, "source_run_id"), 256)
        new_params = dict(checked_pair(key, value) for key, value in (params or {}).items())
        new_tags = dict(checked_pair(key, value) for key, value in (tags or {}).items())
        with self._database.write() as writer:
            experiment = self._experiments.get(experiment_id, connection=writer)
            check_active(experiment)
            model = _new(experiment, name or generate_name(), model_type, source_run_id or None)
            writer.execute(insert(logged_models).values(**vars(model)))
            _write_params(writer, model.id, new_params)
            _write_tags(writer, model.id, new_tags)
            emit(writer, "models", "logged_model.created", model.id, _event(model))
            return load_details(writer, [model])[0]

    def get(self, model_id: str, *, allow_deleted: bool = False) -> LoggedModel:
        with self._database.read() as reader:
            model = _get(reader, model_id)
        if model.lifecycle_stage == "deleted" and not allow_deleted:
            raise logged_model_not_found(model_id)
        return model

    def details(self, model: LoggedModel) -> ModelDetails:
        """Return a model with everything that was logged about it."""
        with self._database.read() as reader:
            return load_details(reader, [model])[0]

    def finalize(self, model_id: str, status: str) -> ModelDetails:
        """Set the result of the upload of a model's files: one of `STATUSES`."""
        if status not in STATUSES:
            raise invalid(f"Invalid value '{printable(status)}' for parameter 'status': use one of {', '.join(STATUSES)}")
        with self._database.write() as writer:
            changed = _change(writer, _get(writer, model_id), status=status)
            return load_details(writer, [changed])[0]

    def delete(self, model_id: str) -> None:
        """Hide a model; its files and everything logged about it are kept."""
        with self._database.write() as writer:
            _change(writer, _get(writer, model_id), lifecycle_stage="deleted")

    def set_tags(self, model_id: str, tags: Mapping[str, str]) -> ModelDetails:
        new = dict(checked_pair(key, value) for key, value in tags.items())
        with self._database.write() as writer:
            model = _get(writer, model_id)
            _write_tags(writer, model_id, new)
            return load_details(writer, [model])[0]

    def delete_tag(self, model_id: str, key: str) -> None:
        with self._database.write() as writer:
            _get(writer, model_id)
            tag = (logged_model_tags.c.model_id == model_id) & (logged_model_tags.c.key == checked_text(key, "key"))
            if writer.execute(delete(logged_model_tags).where(tag)).rowcount == 0:
                raise not_found(f"No tag with key '{printable(key)}' found for model with ID '{model_id}'.")

    def log_params(self, model_id: str, params: Mapping[str, str]) -> None:
        """Add params. As for runs, an equal value is a no-op, another value is refused."""
        new = dict(checked_pair(key, value) for key, value in params.items())
        with self._database.write() as writer:
            _get(writer, model_id)
            _write_params(writer, model_id, new)

    def log_outputs(self, run_id: str, steps: Mapping[str, int]) -> None:
        """Record the models that a run created, each at a step."""
        with self._database.write() as writer:
            require_active(writer, run_id)
            write_run_models(writer, run_id, "output", steps)


def load_details(reader: Connection, models: Sequence[LoggedModel]) -> list[ModelDetails]:
    """Load everything logged about a few hundred models, in four queries."""
    ids = [model.id for model in models]
    metrics = load_model_points(reader, ids)
    pairs: dict[str, dict[str, dict[str, str]]] = {}
    for table in (logged_model_params, logged_model_tags):
        found: dict[str, dict[str, str]] = {model_id: {} for model_id in ids}
        for model_id, key, value in reader.execute(select(table).where(table.c.model_id.in_(ids)).order_by(table.c.key)):
            found[model_id][key] = value
        pairs[table.name] = found
    registrations: dict[str, list[Registration]] = {model_id: [] for model_id in ids}
    made_from = select(model_versions.c.model_id, model_versions.c.name, model_versions.c.version)
    ordered = made_from.where(model_versions.c.model_id.in_(ids)).order_by(model_versions.c.name, model_versions.c.version)
    for model_id, name, version in reader.execute(ordered):
        registrations[model_id].append(Registration(name, version))
    params, tags = pairs[logged_model_params.name], pairs[logged_model_tags.name]
    return [
        ModelDetails(model, params[model.id], tags[model.id], metrics[model.id], registrations[model.id]) for model in models
    ]


def _new(experiment: Experiment, name: str, model_type: str, source_run_id: str | None) -> LoggedModel:
    identifier = f"m-{uuid.uuid4().hex}"
    now = now_ms()
    return LoggedModel(
        id=identifier,
        experiment_id=experiment.id,
        name=name,
        artifact_uri=model_files_uri(experiment.artifact_location, identifier),
        status="pending",
        status_message="",
        model_type=model_type,
        source_run_id=source_run_id,
        lifecycle_stage="active",
        created_at=now,
        updated_at=now,
    )


def _get(reader: Connection, model_id: str) -> LoggedModel:
    query = select(logged_models).where(logged_models.c.id == checked_text(model_id, "model_id"))
    row = reader.execute(query).mappings().first()
    if row is None:
        raise logged_model_not_found(model_id)
    return LoggedModel(**row)


def _change(writer: Connection, model: LoggedModel, **values: str) -> LoggedModel:
    changed = LoggedModel(**{**vars(model), **values, "updated_at": now_ms()})
    row = update(logged_models).where(logged_models.c.id == model.id)
    writer.execute(row.values(**values, updated_at=changed.updated_at))
    emit(writer, "models", "logged_model.updated", model.id, {**_event(changed), "previous_status": model.status})
    return changed


def _event(model: LoggedModel) -> dict[str, Any]:
    names = ("experiment_id", "name", "status", "source_run_id", "lifecycle_stage")
    return {"model_id": model.id, **{name: getattr(model, name) for name in names}}


def _write_params(writer: Connection, model_id: str, new: Mapping[str, str]) -> None:
    """Insert params, then compare the stored values: a concurrent writer may have been first."""
    if not new:
        return
    rows = [{"model_id": model_id, "key": key, "value": new[key]} for key in sorted(new)]
    writer.execute(insert_into(writer, logged_model_params).on_conflict_do_nothing(), rows)
    columns = logged_model_params.c
    stored = select(columns.key, columns.value).where(columns.model_id == model_id, columns.key.in_(sorted(new)))
    for key, old in writer.execute(stored):
        if old != new[key]:
            raise invalid(
                f"Changing param values is not allowed. Param with key='{printable(key)}' was already logged for model with "
                f"ID '{model_id}'."
            )


def _write_tags(writer: Connection, model_id: str, new: Mapping[str, str]) -> None:
    if not new:
        return
    statement = insert_into(writer, logged_model_tags)
    upsert = statement.on_conflict_do_update(index_elements=["model_id", "key"], set_={"value": statement.excluded.value})
    writer.execute(upsert, [{"model_id": model_id, "key": key, "value": new[key]} for key in sorted(new)])
