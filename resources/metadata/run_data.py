"""What a run logs besides metrics: params, which never change, tags, which do, and batches of all three."""

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection, delete, select, update

from resources.errors import invalid, not_found
from resources.metadata.database import Database
from resources.metadata.metrics import write_points
from resources.metadata.tables import params, run_tags, runs
from resources.metadata.tracking_rules import MetricPoint, checked_param, checked_run_tag, checked_text
from resources.metadata.transactions import insert_into, reading, writing

MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_TAGS = 100
MAX_ENTITIES = 1000
NAME_TAG = "mlflow.runName"


class RunData:
    """Params, tags and metric batches in a database. Every method joins the transaction of `connection` where given."""

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
        """All of it or nothing. Sending the same batch again changes nothing."""
        check_batch(len(metrics), len(params), len(tags))
        new_params = unique(checked_param(key, value, f"params[{index}]") for index, (key, value) in enumerate(params))
        new_tags = dict(checked_run_tag(key, value, f"tags[{index}]") for index, (key, value) in enumerate(tags))
        with writing(self._database, connection) as writer:
            require_active(writer, run_id)
            write_params(writer, run_id, new_params)
            write_points(writer, run_id, metrics)
            write_tags(writer, run_id, new_tags)

    def log_param(self, run_id: str, key: str, value: str, *, connection: Connection | None = None) -> None:
        checked_key, checked_value = checked_param(key, value)
        with writing(self._database, connection) as writer:
            require_active(writer, run_id)
            write_params(writer, run_id, {checked_key: checked_value})

    def log_metric(self, run_id: str, point: MetricPoint, *, connection: Connection | None = None) -> None:
        with writing(self._database, connection) as writer:
            require_active(writer, run_id)
            write_points(writer, run_id, [point])

    def set_tag(self, run_id: str, key: str, value: str, *, connection: Connection | None = None) -> None:
        checked_key, checked_value = checked_run_tag(key, value)
        with writing(self._database, connection) as writer:
            require_active(writer, run_id)
            write_tags(writer, run_id, {checked_key: checked_value})

    def delete_tag(self, run_id: str, key: str, *, connection: Connection | None = None) -> None:
        with writing(self._database, connection) as writer:
            require_active(writer, run_id)
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


def check_batch(metrics: int, params: int, tags: int) -> None:
    counts = (
        ("metrics", MAX_METRICS, metrics),
        ("params", MAX_PARAMS, params),
        ("tags", MAX_TAGS, tags),
        ("metrics, params, and tags", MAX_ENTITIES, metrics + params + tags),
    )
    for name, limit, count in counts:
        if count > limit:
            raise invalid(
                f"A batch logging request can contain at most {limit} {name}. Got {count} {name}. "
                f"Please split up {name} across multiple requests and try again."
            )


def unique(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Params of one request, each key once."""
    found: dict[str, str] = {}
    for key, value in pairs:
        if key in found:
            raise invalid(
                f"Duplicate parameter keys have been submitted: {[key]}. Please ensure the request contains only one"
            )
        found[key] = value
    return found


def require_active(writer: Connection, run_id: str) -> None:
    """The run exists and is not deleted. Holds a share lock on PostgreSQL, so that it stays so until the commit."""
    query = select(runs.c.lifecycle_stage).where(runs.c.id == checked_text(run_id, "run_id")).with_for_update(read=True)
    stage = writer.execute(query).scalar()
    if stage is None:
        raise not_found(f"Run with id={run_id} not found")
    check_run_active(run_id, stage)


def check_run_active(run_id: str, lifecycle_stage: str) -> None:
    if lifecycle_stage != "active":
        raise invalid(f"The run {run_id} must be in the 'active' state. Current state is {lifecycle_stage}.")


def write_params(writer: Connection, run_id: str, new: Mapping[str, str]) -> None:
    """Insert, then read back: what is stored now must be what was sent, whoever was first."""
    if not new:
        return
    rows = [{"run_id": run_id, "key": key, "value": new[key]} for key in sorted(new)]
    writer.execute(insert_into(writer, params).on_conflict_do_nothing(), rows)
    query = select(params.c.key, params.c.value).where(params.c.run_id == run_id, params.c.key.in_(sorted(new)))
    for key, old in writer.execute(query):
        if old != new[key]:
            raise invalid(
                f"Changing param values is not allowed. Param with key='{key}' was already logged with value='{old}' "
                f"for run ID='{run_id}'. Attempted logging new value '{new[key]}'."
            )


def write_tags(writer: Connection, run_id: str, new: Mapping[str, str]) -> None:
    """Set tags in the order of their keys, so that two writers cannot wait for each other; the name tag renames."""
    if not new:
        return
    statement = insert_into(writer, run_tags)
    upsert = statement.on_conflict_do_update(index_elements=["run_id", "key"], set_={"value": statement.excluded.value})
    writer.execute(upsert, [{"run_id": run_id, "key": key, "value": new[key]} for key in sorted(new)])
    if new.get(NAME_TAG):
        writer.execute(update(runs).where(runs.c.id == run_id).values(name=new[NAME_TAG][:500]))
