"""Edit registered versions: description, tags and deletion."""

from sqlalchemy import Connection, delete, select, update

from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.registry.model_names import (
    MAX_VERSION,
    ModelKey,
    checked_description,
    checked_model_name,
    checked_tag,
    checked_version_tag_key,
    version_not_found,
)
from resources.metadata.registry.model_versions import ModelVersion, find_version, read_versions
from resources.metadata.registry.registered_model_rows import (
    check_not_served,
    emit_model,
    lock_registry,
    repoint_copy,
    touch_model,
)
from resources.metadata.tables import model_aliases as aliases
from resources.metadata.tables import model_version_tags as version_tags
from resources.metadata.tables import model_versions as versions
from resources.metadata.transactions import insert_into


class ModelVersionEdits:
    """Edits in a database, each in a transaction with its event."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self, model: ModelKey, number: int, description: str) -> ModelVersion:
        checked_description(description)
        with self._database.write() as connection:
            version = lock_version(connection, model, number)
            where = model.row_filter(versions) & (versions.c.version == number)
            connection.execute(update(versions).where(where).values(description=description, updated_at=now_ms()))
            emit_model(connection, "model.version_updated", model, version_facts(version))
            return lock_version(connection, model, number)

    def set_tag(self, model: ModelKey, number: int, key: str, value: str) -> None:
        checked_tag(checked_version_tag_key(key), value)
        with self._database.write() as connection:
            version = lock_version(connection, model, number)
            row = insert_into(connection, version_tags).values(**model.row, version=number, key=key, value=value)
            keys = ["organization", "name", "version", "key"]
            connection.execute(row.on_conflict_do_update(index_elements=keys, set_={"value": value}))
            emit_model(connection, "model.version_tag_set", model, {**version_facts(version), "key": key})

    def delete_tag(self, model: ModelKey, number: int, key: str) -> None:
        """Delete a tag; a missing tag is no error, as in MLflow."""
        checked_version_tag_key(key)
        with self._database.write() as connection:
            version = lock_version(connection, model, number)
            tag = model.row_filter(version_tags) & (version_tags.c.version == number) & (version_tags.c.key == key)
            if connection.execute(delete(version_tags).where(tag)).rowcount:
                emit_model(connection, "model.version_tag_deleted", model, {**version_facts(version), "key": key})

    def delete(self, model: ModelKey, number: int) -> None:
        """Delete a version and the aliases that point at it.

        Its number is never reused, and copies of the version keep its files.

        Raises:
            HanzoError: it is served, or is promoted and about to be served.
        """
        with self._database.write() as connection:
            version = lock_version(connection, model, number)
            check_not_served(connection, model, number, action="deleted")
            copied = versions.c.source == f"models:/{model.name}/{number}"
            own = versions.c.organization == model.organization
            for copy in read_versions(connection, select(versions).where(own, copied)):
                repoint_copy(connection, copy, version.source)
            connection.execute(delete(aliases).where(model.row_filter(aliases), aliases.c.version == number))
            connection.execute(delete(versions).where(model.row_filter(versions), versions.c.version == number))
            touch_model(connection, model)
            emit_model(connection, "model.version_deleted", model, {**version_facts(version), "source": version.source})


def lock_version(connection: Connection, model: ModelKey, number: int) -> ModelVersion:
    """Return a version, locked against other writers until the transaction ends."""
    lock_registry(connection)
    checked_model_name(model.name)
    known = 0 < number <= MAX_VERSION
    version = find_version(connection, model.row_filter(versions), versions.c.version == number) if known else None
    if version is None:
        raise version_not_found(model.name, number)
    return version


def version_facts(version: ModelVersion) -> dict[str, int | str | None]:
    return {"version": version.version, "run_id": version.run_id}
