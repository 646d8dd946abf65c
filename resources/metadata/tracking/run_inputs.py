"""Datasets that runs read, and logged models that they read or created."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, Connection, exists, select

from resources.metadata.database import Database
from resources.metadata.field_rules import MAX_DATASET_DIGEST, MAX_DATASET_NAME, check_length, checked_run_id, checked_text
from resources.metadata.filters.parser import Condition
from resources.metadata.filters.sql import Parameters, compare
from resources.metadata.tables import inputs, run_inputs, run_models, runs
from resources.metadata.tracking.run_data import require_active
from resources.metadata.tracking.run_revisions import bump_revision, next_position
from resources.metadata.transactions import insert_into, reading, writing

# Logged models that a run read, or created at a step.

Direction = Literal["input", "output"]
MAX_MODEL_ID = 256


@dataclass(frozen=True)
class RunModel:
    model_id: str
    direction: Direction
    step: int


def write_run_models(writer: Connection, run_id: str, direction: Direction, steps: Mapping[str, int]) -> None:
    """Link a run to models, each at a step; the last written step wins.

    As in MLflow, it is not checked that a model exists: a run may have read one of another tracking server. With
    organizations, the API checks access.
    """
    if not steps:
        return
    for model_id in steps:
        check_length("model_id", checked_text(model_id, "model_id"), MAX_MODEL_ID)
    bump_revision(writer, run_id)
    statement = insert_into(writer, run_models)
    upsert = statement.on_conflict_do_update(
        index_elements=["run_id", "model_id", "direction"], set_={"step": statement.excluded.step}
    )
    first = next_position(writer, run_models, run_id)
    rows = [
        {"run_id": run_id, "model_id": model_id, "direction": direction, "step": step, "place": place}
        for place, (model_id, step) in enumerate(steps.items(), first)
    ]
    writer.execute(upsert, rows)


def load_run_models(reader: Connection, run_ids: Sequence[str]) -> dict[str, list[RunModel]]:
    """Return the models of a few hundred runs, in the order of logging."""
    query = (
        select(run_models)
        .where(run_models.c.run_id.in_(run_ids))
        .order_by(run_models.c.place, run_models.c.step, run_models.c.model_id)
    )
    loaded: dict[str, list[RunModel]] = {run_id: [] for run_id in run_ids}
    for row in reader.execute(query):
        loaded[row.run_id].append(RunModel(row.model_id, row.direction, row.step))
    return loaded


# Datasets that runs read, as described by MLflow's clients.
#
# Not the dataset versions of this product, which are in `resources.metadata.datasets`.

CONTEXT_TAG = "mlflow.data.context"
MAX_SOURCE_TYPE = 36
MAX_SOURCE = 65_535
MAX_SCHEMA = 1_048_575
MAX_PROFILE = 16_777_215
MAX_TAG_KEY = 255
MAX_TAG_VALUE = 500
MAX_SUMMARIES = 1000


@dataclass(frozen=True)
class Dataset:
    """A description of a dataset, unique by name and digest within its experiment."""

    name: str
    digest: str
    source_type: str
    source: str
    schema: str | None = None
    profile: str | None = None


@dataclass(frozen=True)
class DatasetInput:
    """A dataset as one run used it; the tag `CONTEXT_TAG` states the purpose."""

    dataset: Dataset
    tags: Mapping[str, str]


@dataclass(frozen=True)
class DatasetSummary:
    experiment_id: int
    name: str
    digest: str
    context: str | None


class Inputs:
    """Inputs in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def log(
        self,
        run_id: str,
        datasets: Sequence[DatasetInput] = (),
        model_ids: Sequence[str] = (),
        *,
        connection: Connection | None = None,
    ) -> None:
        """Add inputs to a run; existing ones are kept unchanged, as in MLflow."""
        checked_run_id(run_id)
        named: dict[tuple[str, str], DatasetInput] = {}
        for found in datasets:
            named.setdefault((found.dataset.name, found.dataset.digest), found)
        for found in named.values():
            check_input(found)
        with writing(self._database, connection) as writer:
            require_active(writer, run_id)
            experiment_id = writer.execute(select(runs.c.experiment_id).where(runs.c.id == run_id)).scalar_one()
            # Sorted, to avoid deadlocks.
            numbers = {key: _ensure(writer, experiment_id, named[key].dataset) for key in sorted(named)}
            if named:
                bump_revision(writer, run_id)
                first = next_position(writer, run_inputs, run_id)
                rows = [
                    {"run_id": run_id, "input_id": numbers[key], "tags": dict(found.tags), "place": place}
                    for place, (key, found) in enumerate(named.items(), first)
                ]
                writer.execute(insert_into(writer, run_inputs).on_conflict_do_nothing(), rows)
            write_run_models(writer, run_id, "input", dict.fromkeys(model_ids, 0))

    def summaries(
        self, experiment_ids: Sequence[int], organization: str, *, connection: Connection | None = None
    ) -> list[DatasetSummary]:
        """Return the datasets used by these experiments' runs, with contexts: at most `MAX_SUMMARIES`."""
        context = run_inputs.c.tags[CONTEXT_TAG].as_string().label("context")
        query = (
            select(inputs.c.experiment_id, inputs.c.name, inputs.c.digest, context)
            .join(run_inputs, run_inputs.c.input_id == inputs.c.id)
            .join(runs, runs.c.id == run_inputs.c.run_id)
            .where(inputs.c.experiment_id.in_(experiment_ids), runs.c.organization == organization)
            .distinct()
            .order_by(inputs.c.experiment_id, inputs.c.name, inputs.c.digest, context)
            .limit(MAX_SUMMARIES)
        )
        with reading(self._database, connection) as reader:
            return [DatasetSummary(*row) for row in reader.execute(query)]


def check_input(found: DatasetInput) -> None:
    """Raise a 400 that names the field if an input is invalid."""
    dataset = found.dataset
    limits = (
        ("name", dataset.name, MAX_DATASET_NAME),
        ("digest", dataset.digest, MAX_DATASET_DIGEST),
        ("source_type", dataset.source_type, MAX_SOURCE_TYPE),
        ("source", dataset.source, MAX_SOURCE),
        ("schema", dataset.schema or "", MAX_SCHEMA),
        ("profile", dataset.profile or "", MAX_PROFILE),
        *(("key", key, MAX_TAG_KEY) for key in found.tags),
        *(("value", value, MAX_TAG_VALUE) for value in found.tags.values()),
    )
    for label, value, limit in limits:
        check_length(label, checked_text(value, label), limit)


def load_inputs(reader: Connection, run_ids: Sequence[str]) -> dict[str, list[DatasetInput]]:
    """Return the datasets of a few hundred runs, in the order of logging."""
    query = (
        select(run_inputs.c.run_id, run_inputs.c.tags, inputs)
        .join(inputs, inputs.c.id == run_inputs.c.input_id)
        .where(run_inputs.c.run_id.in_(run_ids))
        .order_by(run_inputs.c.place, inputs.c.id)
    )
    loaded: dict[str, list[DatasetInput]] = {run_id: [] for run_id in run_ids}
    for row in reader.execute(query):
        dataset = Dataset(row.name, row.digest, row.source_type, row.source, row.schema, row.profile)
        loaded[row.run_id].append(DatasetInput(dataset, row.tags))
    return loaded


def uses_dataset(condition: Condition, expected: Parameters, dialect: str) -> ColumnElement[bool]:
    """Return the condition that a run used a dataset matching a condition."""
    context = condition.key == "context"
    value = run_inputs.c.tags[CONTEXT_TAG].as_string() if context else inputs.c[condition.key]
    return exists().where(
        run_inputs.c.run_id == runs.c.id,
        inputs.c.id == run_inputs.c.input_id,
        compare(value, condition.operator, expected, dialect),
    )


def _ensure(writer: Connection, experiment_id: int, dataset: Dataset) -> int:
    """Return the id of a dataset, inserted when the experiment first uses it."""
    row = insert_into(writer, inputs).values(experiment_id=experiment_id, **vars(dataset))
    writer.execute(row.on_conflict_do_nothing())
    known = (inputs.c.experiment_id == experiment_id) & (inputs.c.name == dataset.name) & (inputs.c.digest == dataset.digest)
    number: int = writer.execute(select(inputs.c.id).where(known)).scalar_one()
    return number
