"""Registered models: the names under which versions are kept, with their tags and aliases.

A name's numbers are given out once, ever: exports and deployments are addressed by them. Deleting or renaming a model
leaves its last number in an event, and whoever takes the name later goes on counting from there.
"""

from collections.abc import Mapping

from sqlalchemy import Connection, delete, insert, select, update

from resources.errors import already_exists
from resources.metadata.database import Database
from resources.metadata.model_version_rules import (
    checked_alias,
    checked_description,
    checked_model_name,
    checked_new_alias,
    checked_tag,
    no_version,
)
from resources.metadata.model_versions import find_version
from resources.metadata.outbox import emit, now_ms
from resources.metadata.registered_model_rows import (
    RegisteredModel,
    check_not_served,
    copies,
    insert_model,
    last_number,
    lock_model,
    lock_registry,
    model_row,
    read_models,
    repoint,
    touch,
)
from resources.metadata.tables import deployments
from resources.metadata.tables import model_aliases as aliases
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_model_tags as model_tags
from resources.metadata.tables import registered_models as models
from resources.metadata.tracking_rules import check_key, printable
from resources.metadata.transactions import insert_into, reading, writing


class RegisteredModels:
    """Models in a database. A method that is given an `organization` finds only that organization's models."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self, name: str, organization: str, *, description: str = "", tags: Mapping[str, str] | None = None
    ) -> RegisteredModel:
        checked_model_name(name)
        checked = dict(checked_tag(key, value) for key, value in (tags or {}).items())
        with writing(self._database, None) as writer:
            lock_registry(writer)
            if not insert_model(writer, name, organization, checked_description(description)):
                raise already_exists(f"Registered Model (name={printable(name)}) already exists.")
            if checked:
                writer.execute(insert(model_tags), [{"name": name, "key": key, "value": checked[key]} for key in checked])
            return self.get(name, connection=writer)

    def get(self, name: str, organization: str | None = None, *, connection: Connection | None = None) -> RegisteredModel:
        with reading(self._database, connection) as reader:
            row = model_row(reader, name, organization)
            return read_models(reader, [row])[0]

    def describe(self, name: str, description: str, organization: str | None = None) -> RegisteredModel:
        checked_description(description)
        with writing(self._database, None) as writer:
            lock_model(writer, name, organization)
            writer.execute(update(models).where(models.c.name == name).values(description=description))
            touch(writer, name)
            emit(writer, "models", "model.updated", name, {"name": name})
            return self.get(name, connection=writer)

    def rename(self, name: str, new_name: str, organization: str | None = None) -> RegisteredModel:
        """Give a model another name, and everything that says its name with it.

        Raises:
            HanzoError: the new name is taken; the model is served, and its name is the address that clients call.
        """
        checked_model_name(new_name, "new_name")
        with writing(self._database, None) as writer:
            row = lock_model(writer, name, organization)
            if new_name == name or writer.execute(select(models.c.name).where(models.c.name == new_name)).first():
                raise already_exists(f"Registered Model (name={printable(new_name)}) already exists.")
            check_not_served(writer, name, action="renamed")
            last = max(row["last_version"], last_number(writer, new_name))
            now = now_ms()
            values = {"name": new_name, "last_version": last, "last_update_time": now}
            writer.execute(update(models).where(models.c.name == name).values(**values))
            writer.execute(update(versions).where(versions.c.name == new_name).values(updated_at=now))
            writer.execute(update(deployments).where(deployments.c.name == name).values(name=new_name))
            for copy in copies(writer, name):
                repoint(writer, copy, copy.source.replace(f"models:/{name}/", f"models:/{new_name}/", 1))
            facts = {"name": name, "new_name": new_name, "last_version": row["last_version"]}
            emit(writer, "models", "model.renamed", name, facts)
            return self.get(new_name, connection=writer)

    def delete(self, name: str, organization: str | None = None) -> None:
        """Delete a model with its versions. What was copied from them keeps its files. Raises while it is served."""
        with writing(self._database, None) as writer:
            row = lock_model(writer, name, organization)
            check_not_served(writer, name, action="deleted")
            for copy in copies(writer, name):
                source = f"models:/{name}/"
                original = find_version(
                    writer, versions.c.name == name, versions.c.version == int(copy.source.removeprefix(source))
                )
                if original is not None:
                    repoint(writer, copy, original.source)
            writer.execute(delete(models).where(models.c.name == name))
            emit(writer, "models", "model.deleted", name, {"name": name, "last_version": row["last_version"]})

    def set_tag(self, name: str, key: str, value: str, organization: str | None = None) -> None:
        checked_tag(key, value)
        with writing(self._database, None) as writer:
            lock_model(writer, name, organization)
            row = insert_into(writer, model_tags).values(name=name, key=key, value=value)
            writer.execute(row.on_conflict_do_update(index_elements=["name", "key"], set_={"value": value}))
            emit(writer, "models", "model.tag_set", name, {"name": name, "key": key})

    def delete_tag(self, name: str, key: str, organization: str | None = None) -> None:
        """A tag that is not there is no error, as in MLflow."""
        check_key(key, "key", "key")
        with writing(self._database, None) as writer:
            lock_model(writer, name, organization)
            if writer.execute(delete(model_tags).where(model_tags.c.name == name, model_tags.c.key == key)).rowcount:
                emit(writer, "models", "model.tag_deleted", name, {"name": name, "key": key})

    def set_alias(self, name: str, alias: str, number: int, organization: str | None = None) -> None:
        """Point an alias at a version, away from the one that it pointed at."""
        checked_new_alias(alias)
        with writing(self._database, None) as writer:
            lock_model(writer, name, organization)
            if find_version(writer, versions.c.name == name, versions.c.version == number) is None:
                raise no_version(name, number)
            row = insert_into(writer, aliases).values(name=name, alias=alias, version=number)
            writer.execute(row.on_conflict_do_update(index_elements=["name", "alias"], set_={"version": number}))
            emit(writer, "models", "model.alias_set", name, {"name": name, "alias": alias, "version": number})

    def delete_alias(self, name: str, alias: str, organization: str | None = None) -> None:
        """An alias that is not there is no error, as in MLflow."""
        checked_alias(alias)
        with writing(self._database, None) as writer:
            lock_model(writer, name, organization)
            if writer.execute(delete(aliases).where(aliases.c.name == name, aliases.c.alias == alias)).rowcount:
                emit(writer, "models", "model.alias_deleted", name, {"name": name, "alias": alias})
