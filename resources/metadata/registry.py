"""The registry: how versions come to be and move between stages. Pointers and checksums, never weights (rows O1-O9).

At most one version of a name is in production at any moment; promoting archives the one before it in the same
transaction. What is really served is the deployments' record. Models, tags and aliases are `registered_models`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from recipes.schema import Artifact
from resources.errors import already_exists, invalid
from resources.metadata.database import Database
from resources.metadata.model_stages import STAGE_TAG, STAGES, TRAFFIC_TAG, check_move, check_stage, stage_tags
from resources.metadata.model_version_rules import (
    MAX_VERSION,
    checked_description,
    checked_model_name,
    checked_tag,
    no_version,
)
from resources.metadata.model_versions import (
    NEWEST_FIRST,
    ModelVersion,
    Registration,
    described,
    find_version,
    owned,
    read_versions,
)
from resources.metadata.outbox import emit, now_ms
from resources.metadata.registered_model_rows import ensure_model, lock_model, lock_registry, model_row, touch
from resources.metadata.tables import model_version_tags as version_tags
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_model_tags as model_tags
from resources.metadata.tables import registered_models as models
from resources.metadata.tracking_rules import checked_text, printable
from resources.metadata.transactions import writing

__all__ = ["STAGES", "ModelVersion", "Pointer", "Registration", "Registry"]

LABEL_TAG = "hanzo.version"
"""A version number of the caller's own, such as "3.1": ours are counted."""


@dataclass(frozen=True)
class Pointer:
    """A version that a client registers: files that lie somewhere already. Its source is checked before it gets here."""

    source: str
    created_by: str
    run_id: str | None = None
    model_id: str | None = None
    run_link: str = ""
    description: str = ""
    label: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


def next_version(connection: Connection, name: str) -> int:
    """The next number of a model, given out once: it is rolled back with its version, and never used again after one."""
    number = update(models).where(models.c.name == name).values(last_version=models.c.last_version + 1)
    return int(connection.execute(number.returning(models.c.last_version)).scalar_one())


class Registry:
    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure_model(self, connection: Connection, name: str, organization: str) -> None:
        """The registered model of that name, made when it is missing."""
        ensure_model(connection, name, organization)

    def register(
        self,
        connection: Connection,
        name: str,
        organization: str,
        registration: Registration,
        artifacts: Mapping[str, Artifact],
        *,
        stage: str = "staging",
        quarantine: str | None = None,
    ) -> ModelVersion:
        """The version of a run in a stage, or quarantined with the reason. A run has one version per name, ever."""
        self.ensure_model(connection, name, organization)
        known = self.of_run(name, registration.run_id, connection)
        if known is not None:
            return known
        values = {key: value for key, value in vars(registration).items() if key != "tags"} | {
            "sole_run_id": registration.run_id,
            "stage": "none" if quarantine else stage,
            "status": "quarantined" if quarantine else "pending",
            "reason": quarantine or "",
            "artifacts": {format: described(artifact) for format, artifact in artifacts.items()},
        }
        return self._insert(connection, name, values, registration.tags)

    def create(
        self, name: str, pointer: Pointer, organization: str | None = None, *, connection: Connection | None = None
    ) -> ModelVersion:
        """The next version of a model, as a client points at it: ready at once. A run may have as many as it likes."""
        tags = dict(checked_tag(key, value) for key, value in pointer.tags.items())
        checked_description(pointer.description)
        checked_text(pointer.run_link, "run_link")
        with writing(self._database, connection) as writer:
            row = lock_model(writer, name, organization)
            if pointer.label:
                tags |= self._label(writer, row, pointer.label)
            values = {key: value for key, value in vars(pointer).items() if key not in ("tags", "label")}
            return self._insert(writer, name, {**values, "stage": "none", "status": "ready"}, tags)

    def add_artifacts(self, connection: Connection, version: ModelVersion, artifacts: Mapping[str, Artifact]) -> None:
        """Exports of a version; a pending version is ready from then on."""
        stored = dict(version.artifacts) | {format: described(artifact) for format, artifact in artifacts.items()}
        status = "ready" if version.status == "pending" else version.status
        if stored == dict(version.artifacts) and status == version.status:
            return
        self._change(connection, version, artifacts=stored, status=status)
        facts = {"name": version.name, "version": version.version, "formats": sorted(stored)}
        emit(connection, "models", "model.exported", version.name, facts)

    def promote(
        self,
        name: str,
        number: int,
        stage: str,
        *,
        user: str,
        force: bool = False,
        is_admin: bool = False,
        traffic_percent: int | None = None,
        archive: Sequence[str] = (),
        organization: str | None = None,
        connection: Connection | None = None,
    ) -> ModelVersion:
        """Move a version to a stage (row O3); into production, the one that was there is archived with it (row O4).

        `archive` names further stages whose other versions are archived too. The event says whether there is anything to
        serve: a client may put a mere pointer into production, as in MLflow, and nothing is to be deployed then.

        Raises:
            HanzoError: unknown stage; the version is quarantined (unless an admin forces it) or not exported yet.
        """
        check_stage(stage)
        tags = stage_tags(stage, traffic_percent)
        with writing(self._database, connection) as writer:
            lock_registry(writer)
            version = self.get(name, number, writer, organization)
            check_move(version, stage, force=force, is_admin=is_admin)
            replaced = self.in_production(name, writer) if stage == "production" else None
            vacated = ["production", *archive] if stage == "production" else list(archive)
            others = select(versions).where(
                versions.c.name == name, versions.c.version != number, versions.c.stage.in_(vacated)
            )
            left = read_versions(writer, others)
            if version.stage == stage and not left and tags.items() <= version.tags.items():
                return version
            for other in left:
                self._move(writer, other, "archived")
            self._move(writer, version, stage, tags)
            touch(writer, name)
            facts = {"name": name, "version": number, "stage": stage, "run_id": version.run_id, "user_id": user}
            more = {
                "forced": force,
                "replaced": replaced.version if replaced else None,
                "archived": sorted(other.version for other in left),
                "servable": version.servable,
            }
            emit(writer, "models", "model.promoted", name, {**facts, **more})
            return self.get(name, number, writer)

    def restore(self, connection: Connection, failed: ModelVersion, previous: int | None, reason: str) -> None:
        """A promotion that could not be served: back to `staging`, and the version before it back to production."""
        if self.get(failed.name, failed.version, connection).stage != "production":
            return
        self._change(connection, failed, stage="none" if failed.status == "quarantined" else "staging")
        if previous is not None:
            self._change(connection, self.get(failed.name, previous, connection), stage="production")
        facts = {"name": failed.name, "version": failed.version, "restored": previous, "reason": reason}
        emit(connection, "models", "model.restored", failed.name, facts)

    def get(self, name: str, number: int, connection: Connection, organization: str | None = None) -> ModelVersion:
        found = self.find(name, number, connection, organization)
        if found is None:
            raise no_version(name, number)
        return found

    def find(self, name: str, number: int, connection: Connection, organization: str | None = None) -> ModelVersion | None:
        checked_model_name(name)
        if not 0 < number <= MAX_VERSION:
            return None
        return find_version(connection, versions.c.name == name, versions.c.version == number, *owned(organization))

    def read(self, name: str, number: int, organization: str | None = None) -> ModelVersion:
        """`get` in a transaction of its own."""
        with self._database.read() as connection:
            return self.get(name, number, connection, organization)

    def labelled(
        self, name: str, label: str, connection: Connection, organization: str | None = None
    ) -> ModelVersion | None:
        """The version that its registrar gave this number of their own."""
        named = select(version_tags.c.version).where(
            version_tags.c.name == name, version_tags.c.key == LABEL_TAG, version_tags.c.value == label
        )
        return find_version(connection, versions.c.name == name, versions.c.version.in_(named), *owned(organization))

    def of_run(self, name: str, run_id: str, connection: Connection) -> ModelVersion | None:
        """The one version of a run that `register` made."""
        return find_version(connection, versions.c.name == name, versions.c.sole_run_id == run_id)

    def in_production(self, name: str, connection: Connection) -> ModelVersion | None:
        return find_version(connection, versions.c.name == name, versions.c.stage == "production")

    def last_accepted(self, name: str, connection: Connection) -> ModelVersion | None:
        """The newest version that passed its gate: what a new one is compared with (row M3)."""
        gated = versions.c.sole_run_id.is_not(None)  # a client's pointer is ready too, but nothing ever evaluated it
        return find_version(connection, versions.c.name == name, versions.c.status == "ready", gated)

    def models(self, organization: str) -> Sequence[Mapping[str, Any]]:
        query = select(models).where(models.c.organization == organization).order_by(models.c.name)
        with self._database.read() as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
            tags = connection.execute(select(model_tags)).mappings().all()
        return [row | {"tags": {tag["key"]: tag["value"] for tag in tags if tag["name"] == row["name"]}} for row in rows]

    def versions(self, name: str, organization: str | None = None) -> list[ModelVersion]:
        """All versions of a model, newest first. Raises when there is no such model."""
        with self._database.read() as connection:
            model_row(connection, name, organization)
            return read_versions(connection, select(versions).where(versions.c.name == name).order_by(NEWEST_FIRST))

    def _label(self, writer: Connection, row: Mapping[str, Any], label: str) -> dict[str, str]:
        """A caller's own number as a tag; a whole number is one of ours, and must be the one that comes next."""
        if label.isdecimal():
            if int(label) != row["last_version"] + 1:
                raise invalid(f"version {label} is not the next one: leave it out, or give {row['last_version'] + 1}")
            return {}
        if self.labelled(row["name"], label, writer) is not None:
            raise already_exists(f"model '{row['name']}' has a version '{printable(label)}' already: register another one")
        return dict([checked_tag(LABEL_TAG, label)])

    def _insert(self, connection: Connection, name: str, values: Mapping[str, Any], tags: Mapping[str, str]) -> ModelVersion:
        number = next_version(connection, name)
        now = now_ms()
        empty = {"reason": "", "run_link": "", "architecture": "", "base_model": "", "method": "", "description": ""}
        row = {**empty, "artifacts": {}, "training_config": {}, **values}
        connection.execute(insert(versions).values(**row, name=name, version=number, created_at=now, updated_at=now))
        self._set_tags(connection, name, number, tags)
        touch(connection, name)
        facts = {"name": name, "version": number, "run_id": values["run_id"], "status": values["status"]}
        emit(connection, "models", "model.registered", name, facts)
        return self.get(name, number, connection)

    def _move(
        self, connection: Connection, version: ModelVersion, stage: str, tags: Mapping[str, str] | None = None
    ) -> None:
        self._change(connection, version, stage=stage)
        mine = (version_tags.c.name == version.name) & (version_tags.c.version == version.version)
        connection.execute(delete(version_tags).where(mine, version_tags.c.key.in_((STAGE_TAG, TRAFFIC_TAG))))
        self._set_tags(connection, version.name, version.version, tags or {})

    @staticmethod
    def _set_tags(connection: Connection, name: str, number: int, tags: Mapping[str, str]) -> None:
        rows = [{"name": name, "version": number, "key": key, "value": value} for key, value in tags.items()]
        if rows:
            connection.execute(insert(version_tags), rows)

    @staticmethod
    def _change(connection: Connection, version: ModelVersion, **values: Any) -> None:
        where = (versions.c.name == version.name) & (versions.c.version == version.version)
        connection.execute(update(versions).where(where).values(**values, updated_at=now_ms()))
