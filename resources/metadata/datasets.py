"""Dataset versions: immutable, numbered, deduplicated by content."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, cast, delete, exists, func, insert, select, update
from sqlalchemy.dialects.postgresql import JSONB

from recipes.contracts.validation_errors import suggest_spelling
from recipes.storage import uris
from recipes.storage.manifest import Artifact
from resources.errors import not_found
from resources.metadata.database import Database
from resources.metadata.field_rules import checked_dataset_metadata, checked_dataset_tags, parse_dataset_reference
from resources.metadata.filters.pagination import Keyset, SortKey
from resources.metadata.outbox import emit
from resources.metadata.tables import dataset_versions as table
from resources.metadata.tables import datasets as names
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.metadata.transactions import insert_into

# Locks that serialize deleting a version with deriving something from it: whichever commits second sees the first.
#
# SQLite has only one writer anyway. Without locks PostgreSQL could commit both: one has checked that the version is
# unreferenced, the other that it still exists.


def lock_for_derivation(connection: Connection, dataset_id: str) -> bool:
    """Return whether the version exists, and keep it until this transaction ends."""
    existing = select(table.c.id).where(table.c.id == dataset_id).with_for_update(read=True, key_share=True)
    return connection.execute(existing).first() is not None


def lock_for_deletion(connection: Connection, dataset_id: str) -> None:
    """Wait for transactions that are deriving from the version, and block new ones.

    Call it before checking for references to the version.
    """
    connection.execute(select(table.c.id).where(table.c.id == dataset_id).with_for_update())


# Where the versions of a dataset are stored.


def dataset_folder(organization: str, name: str) -> str:
    """Return the folder of a dataset's versions.

    Organization folders begin with '@', which no dataset name does, so the two cannot collide.
    """
    return uris.dataset_folder(name, None if organization == DEFAULT_ORGANIZATION else organization)


# Dataset versions: immutable, numbered from 1 per name, unique by content.
#
# `resources.ingest` creates them from files, `resources.datasets.deletion` deletes them; the program prepare splits them.

MAX_PAGE = 1000


@dataclass(frozen=True)
class DatasetVersion:
    """One version; the specification's fields. Sizes in bytes, times in milliseconds."""

    id: str
    name: str
    version: int
    organization: str
    created_at: int
    created_by: str
    storage_path: str
    format: str
    size_bytes: int
    num_records: int
    schema: Mapping[str, str]
    splits: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tags: Sequence[str]
    lineage: Mapping[str, Any]
    content_sha256: str
    artifact: Artifact

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def is_prepared(self) -> bool:
        """Whether the program prepare created it together with its splits, which are then final."""
        return bool(self.splits) and isinstance(self.lineage["transform"], Mapping)

    def split(self, name: str) -> Artifact:
        """Return the artifact of a split. Raises if the version has not been split yet."""
        if name not in self.splits:
            raise not_found(f"dataset {self.reference} has no split '{name}' yet")
        return Artifact.model_validate(self.splits[name]["artifact"])


class Datasets:
    def __init__(self, database: Database) -> None:
        self._database = database

    def find_by_content(self, connection: Connection, organization: str, name: str, content: str) -> DatasetVersion | None:
        """Return the version that already has this content, or None."""
        query = select(table).where(
            table.c.organization == organization, table.c.name == name, table.c.content_sha256 == content
        )
        return _first(connection, query)

    def next_number(self, connection: Connection, organization: str, name: str) -> int:
        """Return the number of the next version, unless another transaction reserves it first."""
        query = select(names.c.last_version).where(names.c.organization == organization, names.c.name == name)
        return int(connection.execute(query).scalar() or 0) + 1

    def reserve_number(self, connection: Connection, organization: str, name: str) -> int:
        """Reserve the next number; no other transaction creates versions of this name meanwhile."""
        row = insert_into(connection, names).values(organization=organization, name=name, last_version=1)
        upsert = row.on_conflict_do_update(
            index_elements=["organization", "name"], set_={"last_version": names.c.last_version + 1}
        ).returning(names.c.last_version)
        return int(connection.execute(upsert).scalar_one())

    def add(self, connection: Connection, version: DatasetVersion) -> None:
        """Record a version whose files are already stored, and emit its event."""
        row = vars(version) | {"artifact": version.artifact.model_dump()}
        connection.execute(insert(table).values(**row))
        facts = {"dataset_id": version.id, "name": version.name, "version": version.version, "user_id": version.created_by}
        emit(connection, "datasets", "dataset.created", version.name, facts)

    def set_splits(self, connection: Connection, version: DatasetVersion, splits: Mapping[str, Any]) -> None:
        """Record where the splits of a version are; no event if they are recorded already."""
        if dict(self.get(version.id, connection).splits) == dict(splits):
            return
        connection.execute(update(table).where(table.c.id == version.id).values(splits=dict(splits)))
        facts = {"dataset_id": version.id, "name": version.name, "version": version.version}
        emit(connection, "datasets", "dataset.split", version.name, facts)

    def get(self, identifier: str, connection: Connection) -> DatasetVersion:
        found = _first(connection, select(table).where(table.c.id == identifier))
        if found is None:
            raise not_found(f"no dataset version has the id '{identifier}': see `hanzo-ml dataset list`")
        return found

    def resolve(self, reference: str, organization: str, connection: Connection) -> DatasetVersion:
        """Return the version of `NAME` (the newest) or `NAME@VERSION`."""
        name, number = parse_dataset_reference(reference)
        query = select(table).where(table.c.name == name, table.c.organization == organization)
        if number is not None:
            query = query.where(table.c.version == number)
        found = _first(connection, query.order_by(table.c.version.desc()).limit(1))
        if found is None:
            raise not_found(f"there is no dataset '{reference}': {_suggest_remedy(name, organization, connection)}")
        return found

    def describe(
        self, identifier: str, tags: Sequence[str] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> DatasetVersion:
        """Replace tags or metadata, the only mutable fields because neither is content."""
        changed = {
            "tags": None if tags is None else checked_dataset_tags(tags),
            "metadata": None if metadata is None else checked_dataset_metadata(metadata),
        }
        values = {column: value for column, value in changed.items() if value is not None}
        with self._database.write() as connection:
            version = self.get(identifier, connection)
            if values:
                connection.execute(update(table).where(table.c.id == identifier).values(**values))
                facts = {"dataset_id": version.id, "name": version.name, "version": version.version, **values}
                emit(connection, "datasets", "dataset.described", version.name, facts)
            return self.get(identifier, connection)

    def remove(self, connection: Connection, version: DatasetVersion, user: str) -> None:
        """Delete a version and emit its event."""
        connection.execute(delete(table).where(table.c.id == version.id))
        facts = {"dataset_id": version.id, "name": version.name, "version": version.version, "user_id": user}
        facts |= {"organization": version.organization}  # the row is gone
        emit(connection, "datasets", "dataset.deleted", version.name, facts)

    def page(
        self,
        organization: str,
        *,
        name: str | None = None,
        tags: Sequence[str] = (),
        limit: int = MAX_PAGE,
        page_token: str | None = None,
    ) -> tuple[list[DatasetVersion], str | None]:
        """Return versions that have all tags, by name and number, and the next page's token."""
        query = select(table).where(table.c.organization == organization)
        if name:
            query = query.where(table.c.name == name)
        order = Keyset([SortKey(table.c.name, True, str), SortKey(table.c.version, True, int)], (organization, name, *tags))
        with self._database.read() as connection:
            for tag in tags:
                query = query.where(has_tag(connection, tag))
            rows = connection.execute(order.page(query, limit, page_token)).all()
        columns = tuple(table.c.keys())
        found = [_version(dict(zip(columns, row, strict=False))) for row in rows[:limit]]
        return found, order.next_token(rows, limit)

    def list(self, organization: str, name: str | None = None, tags: Sequence[str] = ()) -> list[DatasetVersion]:
        """Return the versions of all pages."""
        found, token = self.page(organization, name=name, tags=tags)
        while token:
            more, token = self.page(organization, name=name, tags=tags, page_token=token)
            found.extend(more)
        return found

    def read(self, reference: str, organization: str) -> DatasetVersion:
        """Call `resolve` in a transaction of its own."""
        with self._database.read() as connection:
            return self.resolve(reference, organization, connection)


def has_tag(connection: Connection, tag: str) -> ColumnElement[bool]:
    """Return a condition that a version has a tag, using the database's JSON functions."""
    if connection.dialect.name == "postgresql":
        return cast(table.c.tags, JSONB).contains([tag])
    each = func.json_each(table.c.tags).table_valued("value")
    return exists(select(each.c.value).where(each.c.value == tag))


def _first(connection: Connection, query: Any) -> DatasetVersion | None:
    row = connection.execute(query).mappings().first()
    return _version(row) if row else None


def _version(row: Mapping[Any, Any]) -> DatasetVersion:
    return DatasetVersion(**{**row, "artifact": Artifact.model_validate(row["artifact"])})


def new_id() -> str:
    return str(uuid.uuid4())


def _suggest_remedy(name: str, organization: str, connection: Connection) -> str:
    """Suggest what to do about a dataset or version that does not exist."""
    query = select(table.c.name, func.max(table.c.version)).where(table.c.organization == organization)
    newest = {row.name: row[1] for row in connection.execute(query.group_by(table.c.name))}
    if name in newest:
        return f"the newest version is {name}@{newest[name]}"
    if meant := suggest_spelling(name, newest):
        return f"did you mean '{meant}'?"
    return f"create it with `hanzo-ml dataset create --name {name} --path FILE`"
