"""Registered models: the names of groups of versions, with tags and aliases.

A version number is never reused within a name, because exports and deployments are addressed by it. Deleting or renaming a
model records its last number in an event, and a later model of that name continues from there.
"""

from collections.abc import Mapping

from sqlalchemy import Connection, delete, insert, select, update

from resources.errors import already_exists
from resources.metadata.database import Database
from resources.metadata.field_rules import check_key, printable
from resources.metadata.outbox import now_ms
from resources.metadata.registry.model_names import (
    MAX_VERSION,
    ModelKey,
    checked_alias,
    checked_description,
    checked_model_name,
    checked_new_alias,
    checked_tag,
    name_conflict_error,
    version_not_found,
)
from resources.metadata.registry.model_versions import find_version
from resources.metadata.registry.registered_model_rows import (
    RegisteredModel,
    check_not_served,
    emit_model,
    find_copies,
    insert_model,
    last_number,
    lock_model,
    lock_registry,
    model_row,
    read_models,
    repoint_copy,
    touch_model,
)
from resources.metadata.registry.stage_rules import check_usable
from resources.metadata.tables import deployments
from resources.metadata.tables import model_aliases as aliases
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_model_tags as model_tags
from resources.metadata.tables import registered_models as models
from resources.metadata.transactions import insert_into, reading, writing


class RegisteredModels:
    """Models in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, model: ModelKey, *, description: str = "", tags: Mapping[str, str] | None = None) -> RegisteredModel:
        checked_model_name(model.name)
        checked = dict(checked_tag(key, value) for key, value in (tags or {}).items())
        with writing(self._database, None) as writer:
            lock_registry(writer)
            if not insert_model(writer, model, checked_description(description)):
                raise name_conflict_error(model.name, old=self.get(model, connection=writer).tags, new=checked)
            if checked:
                writer.execute(insert(model_tags), [{**model.row, "key": key, "value": checked[key]} for key in checked])
            return self.get(model, connection=writer)

    def get(self, model: ModelKey, *, connection: Connection | None = None) -> RegisteredModel:
        with reading(self._database, connection) as reader:
            return read_models(reader, model.organization, [model_row(reader, model)])[0]

    def describe(self, model: ModelKey, description: str) -> RegisteredModel:
        checked_description(description)
        with writing(self._database, None) as writer:
            lock_model(writer, model)
            writer.execute(update(models).where(model.row_filter(models)).values(description=description))
            touch_model(writer, model)
            emit_model(writer, "model.updated", model)
            return self.get(model, connection=writer)

    def rename(self, model: ModelKey, new_name: str) -> RegisteredModel:
        """Rename a model and all references to it; no-op for the same name.

        Raises:
            HanzoError: the new name is in use; or the model is served, and clients call it by its name.
        """
        checked_model_name(new_name, "new_name")
        renamed = ModelKey(model.organization, new_name)
        with writing(self._database, None) as writer:
            row = lock_model(writer, model)
            if renamed == model:
                return self.get(model, connection=writer)
            if writer.execute(select(models.c.name).where(renamed.row_filter(models))).first():
                raise already_exists(f"Registered Model (name={printable(new_name)}) already exists.")
            check_not_served(writer, model, action="renamed")
            last = max(row["last_version"], last_number(writer, renamed))
            now = now_ms()
            values = {"name": new_name, "last_version": last, "last_update_time": now}
            writer.execute(update(models).where(model.row_filter(models)).values(**values))
            writer.execute(update(versions).where(renamed.row_filter(versions)).values(updated_at=now))
            writer.execute(update(deployments).where(model.row_filter(deployments)).values(name=new_name))
            for copy in find_copies(writer, model):
                repoint_copy(writer, copy, copy.source.replace(f"models:/{model.name}/", f"models:/{new_name}/", 1))
            emit_model(writer, "model.renamed", model, {"new_name": new_name, "last_version": row["last_version"]})
            return self.get(renamed, connection=writer)

    def delete(self, model: ModelKey) -> None:
        """Delete a model and its versions; copies keep their files. Raises while served."""
        with writing(self._database, None) as writer:
            row = lock_model(writer, model)
            check_not_served(writer, model, action="deleted")
            for copy in find_copies(writer, model):
                number = int(copy.source.removeprefix(f"models:/{model.name}/"))
                original = find_version(writer, model.row_filter(versions), versions.c.version == number)
                if original is not None:
                    repoint_copy(writer, copy, original.source)
            writer.execute(delete(models).where(model.row_filter(models)))
            emit_model(writer, "model.deleted", model, {"last_version": row["last_version"]})

    def set_tag(self, model: ModelKey, key: str, value: str) -> None:
        checked_tag(key, value)
        with writing(self._database, None) as writer:
            lock_model(writer, model)
            row = insert_into(writer, model_tags).values(**model.row, key=key, value=value)
            keys = ["organization", "name", "key"]
            writer.execute(row.on_conflict_do_update(index_elements=keys, set_={"value": value}))
            emit_model(writer, "model.tag_set", model, {"key": key})

    def delete_tag(self, model: ModelKey, key: str) -> None:
        """Delete a tag; a missing tag is no error, as in MLflow."""
        check_key(key, "key", "key")
        with writing(self._database, None) as writer:
            lock_model(writer, model)
            if writer.execute(delete(model_tags).where(model.row_filter(model_tags), model_tags.c.key == key)).rowcount:
                emit_model(writer, "model.tag_deleted", model, {"key": key})

    def set_alias(self, model: ModelKey, alias: str, number: int) -> None:
        """Point an alias at a version, replacing its previous target.

        Raises:
            HanzoError: there is no such model or version, or it is quarantined.
        """
        checked_new_alias(alias)
        with writing(self._database, None) as writer:
            lock_model(writer, model)
            known = 0 < number <= MAX_VERSION
            version = find_version(writer, model.row_filter(versions), versions.c.version == number) if known else None
            if version is None:
                raise version_not_found(model.name, number)
            check_usable(version)
            row = insert_into(writer, aliases).values(**model.row, alias=alias, version=number)
            keys = ["organization", "name", "alias"]
            writer.execute(row.on_conflict_do_update(index_elements=keys, set_={"version": number}))
            emit_model(writer, "model.alias_set", model, {"alias": alias, "version": number})

    def delete_alias(self, model: ModelKey, alias: str) -> None:
        """Delete an alias; a missing alias is no error, as in MLflow."""
        checked_alias(alias)
        with writing(self._database, None) as writer:
            lock_model(writer, model)
            if writer.execute(delete(aliases).where(model.row_filter(aliases), aliases.c.alias == alias)).rowcount:
                emit_model(writer, "model.alias_deleted", model, {"alias": alias})
