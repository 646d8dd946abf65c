"""What people change about a version that stands: its description, its tags, and that it is there at all."""

from sqlalchemy import Connection, delete, select, update

from resources.metadata.database import Database
from resources.metadata.model_version_rules import (
    MAX_VERSION,
    checked_description,
    checked_model_name,
    checked_tag,
    no_version,
)
from resources.metadata.model_versions import ModelVersion, find_version, owned, read_versions
from resources.metadata.outbox import emit, now_ms
from resources.metadata.registered_model_rows import check_not_served, lock_registry, repoint, touch
from resources.metadata.tables import model_aliases as aliases
from resources.metadata.tables import model_version_tags as version_tags
from resources.metadata.tables import model_versions as versions
from resources.metadata.tracking_rules import check_key
from resources.metadata.transactions import insert_into


class ModelVersionEdits:
    """Edits in a database, each a transaction with its event. An `organization` hides every other one's versions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self, name: str, number: int, description: str, organization: str | None = None) -> ModelVersion:
        checked_description(description)
        with self._database.write() as connection:
            version = locked(connection, name, number, organization)
            where = (versions.c.name == name) & (versions.c.version == number)
            connection.execute(update(versions).where(where).values(description=description, updated_at=now_ms()))
            emit(connection, "models", "model.version_updated", name, facts(version))
            return locked(connection, name, number)

    def set_tag(self, name: str, number: int, key: str, value: str, organization: str | None = None) -> None:
        checked_tag(key, value)
        with self._database.write() as connection:
            version = locked(connection, name, number, organization)
            row = insert_into(connection, version_tags).values(name=name, version=number, key=key, value=value)
            keys = ["name", "version", "key"]
            connection.execute(row.on_conflict_do_update(index_elements=keys, set_={"value": value}))
            emit(connection, "models", "model.version_tag_set", name, {**facts(version), "key": key})

    def delete_tag(self, name: str, number: int, key: str, organization: str | None = None) -> None:
        """A tag that is not there is no error, as in MLflow."""
        check_key(key, "key", "key")
        with self._database.write() as connection:
            version = locked(connection, name, number, organization)
            tag = (version_tags.c.name == name) & (version_tags.c.version == number) & (version_tags.c.key == key)
            if connection.execute(delete(version_tags).where(tag)).rowcount:
                emit(connection, "models", "model.version_tag_deleted", name, {**facts(version), "key": key})

    def delete(self, name: str, number: int, organization: str | None = None) -> None:
        """Delete a version and the aliases that point at it; its number stays used, and its copies keep its files.

        Raises:
            HanzoError: it is served, or promoted and about to be.
        """
        with self._database.write() as connection:
            version = locked(connection, name, number, organization)
            check_not_served(connection, name, number, action="deleted")
            for copy in read_versions(connection, select(versions).where(versions.c.source == f"models:/{name}/{number}")):
                repoint(connection, copy, version.source)
            connection.execute(delete(aliases).where(aliases.c.name == name, aliases.c.version == number))
            connection.execute(delete(versions).where(versions.c.name == name, versions.c.version == number))
            touch(connection, name)
            emit(connection, "models", "model.version_deleted", name, {**facts(version), "source": version.source})


def locked(connection: Connection, name: str, number: int, organization: str | None = None) -> ModelVersion:
    """A version of a model that nobody else changes from here on."""
    lock_registry(connection)
    mine = [versions.c.name == checked_model_name(name), versions.c.version == number, *owned(organization)]
    version = find_version(connection, *mine) if 0 < number <= MAX_VERSION else None
    if version is None:
        raise no_version(name, number)
    return version


def facts(version: ModelVersion) -> dict[str, str | int | None]:
    return {"name": version.name, "version": version.version, "run_id": version.run_id}
