"""The registry: how versions come to be and move between stages. Pointers and checksums, never weights (rows O1-O9).

At most one version of a name is in production at any moment; promoting archives the one before it in the same
transaction. What is really served is the deployments' record. Models, tags and aliases are `registered_models`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from recipes.storage.manifest import Artifact
from resources.errors import already_exists, conflict
from resources.metadata.database import Database
from resources.metadata.field_rules import checked_text, printable
from resources.metadata.outbox import now_ms
from resources.metadata.registry import deployments
from resources.metadata.registry.model_names import (
    LABEL_TAG,
    MAX_VERSION,
    STAGE_TAG,
    TRAFFIC_TAG,
    ModelKey,
    checked_description,
    checked_model_name,
    checked_tag,
    checked_version_tags,
    version_not_found,
)
from resources.metadata.registry.model_versions import (
    EXPORT_FAILED,
    NEWEST_FIRST,
    LoggedFiles,
    ModelVersion,
    Registration,
    artifact_row,
    find_version,
    read_versions,
)
from resources.metadata.registry.registered_model_rows import (
    emit_model,
    ensure_model,
    lock_model,
    lock_registry,
    touch_model,
)
from resources.metadata.registry.stage_rules import STAGES, check_move, check_replaceable, check_stage, stage_tags
from resources.metadata.tables import model_version_tags as version_tags
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_models as models
from resources.metadata.transactions import writing

__all__ = ["STAGES", "ClientVersion", "ModelVersion", "Registration", "Registry", "SourceDescription"]


AWAITING_STATUSES = ("pending", "failed")
"""Of a version that passed its gate and has no export yet: none has ended, or the last one failed."""


@dataclass(frozen=True)
class SourceDescription:
    """What is known of files that a client points at; the rest is empty."""

    architecture: str = ""
    base_model: str = ""
    method: str = ""
    artifacts: Mapping[str, LoggedFiles] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    training_config: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientVersion(SourceDescription):
    """A version that a client registers: files that lie somewhere already. Its source is checked before it gets here."""

    source: str
    created_by: str
    run_id: str | None = None
    model_id: str | None = None
    run_link: str = ""
    description: str = ""
    label: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


def next_version(connection: Connection, model: ModelKey) -> int:
    """The next number of a model, given out once: it is rolled back with its version, and never used again after one."""
    number = update(models).where(model.row_filter(models)).values(last_version=models.c.last_version + 1)
    return int(connection.execute(number.returning(models.c.last_version)).scalar_one())


class Registry:
    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure_model(self, connection: Connection, model: ModelKey) -> None:
        """The registered model of that name, made when it is missing."""
        ensure_model(connection, model)

    def register(
        self,
        connection: Connection,
        model: ModelKey,
        registration: Registration,
        artifacts: Mapping[str, Artifact | LoggedFiles],
        *,
        stage: str = "staging",
        quarantine: str | None = None,
    ) -> ModelVersion:
        """The version of a run in a stage, or quarantined with the reason. A run has one version per name, ever."""
        tags = checked_version_tags(registration.tags)
        self.ensure_model(connection, model)
        known = self.find_by_run(model, registration.run_id, connection)
        if known is not None:
            return known
        values = {key: value for key, value in vars(registration).items() if key != "tags"} | {
            "sole_run_id": registration.run_id,
            "stage": "none" if quarantine else stage,
            "status": "quarantined" if quarantine else "pending",
            "reason": quarantine or "",
            "artifacts": {format: artifact_row(artifact) for format, artifact in artifacts.items()},
        }
        return self._insert(connection, model, values, tags)

    def create(self, model: ModelKey, pointer: ClientVersion, *, connection: Connection | None = None) -> ModelVersion:
        """The next version of a model, as a client points at it: ready at once. A run may have as many as it likes."""
        tags = checked_version_tags(pointer.tags)
        checked_description(pointer.description)
        checked_text(pointer.run_link, "run_link")
        with writing(self._database, connection) as writer:
            row = lock_model(writer, model)
            if pointer.label:
                tags |= self._label(writer, model, row["last_version"] + 1, pointer.label)
            values = {key: value for key, value in vars(pointer).items() if key not in ("tags", "label")}
            files = {format: artifact_row(logged) for format, logged in pointer.artifacts.items()}
            return self._insert(writer, model, {**values, "artifacts": files, "stage": "none", "status": "ready"}, tags)

    def add_artifacts(self, connection: Connection, version: ModelVersion, artifacts: Mapping[str, Artifact]) -> None:
        """Exports of a version; one that waited for its export, or whose export failed before, is ready from then on.

        Raises:
            HanzoError: 409 where the version has other bytes in one of these formats: what is registered never changes.
        """
        for format, artifact in artifacts.items():
            if (
                format in version.artifacts
                and version.artifacts[format].get("checksum") != artifact_row(artifact)["checksum"]
            ):
                raise conflict(f"{version.reference} has a {format} already, and other bytes: add it as another format")
        stored = dict(version.artifacts) | {format: artifact_row(artifact) for format, artifact in artifacts.items()}
        status = "ready" if version.status in AWAITING_STATUSES else version.status
        if stored == dict(version.artifacts) and status == version.status:
            return
        self._change(connection, version, artifacts=stored, status=status, reason=version.gate_reason)
        emit_model(connection, "model.exported", version.model, {"version": version.version, "formats": sorted(stored)})

    def begin_export(self, connection: Connection, version: ModelVersion) -> None:
        """An export begins: that one before it failed is no news any more."""
        status = "pending" if version.status == "failed" else version.status
        reason = version.gate_reason
        if (status, reason) != (version.status, version.reason):
            self._change(connection, version, status=status, reason=reason)

    def fail_export(self, connection: Connection, version: ModelVersion, reason: str) -> None:
        """Record why a version has nothing to serve. One that has, by another export, stays as it is."""
        current = self.get(version.model, version.version, connection)
        if not current.is_awaiting_export:
            return
        message = " ".join(reason.split())
        if current.status in AWAITING_STATUSES:
            self._change(connection, current, status="failed", reason=message)
        elif current.status == "quarantined":  # which it stays, until an admin promotes it
            self._change(connection, current, reason=f"{current.gate_reason}{EXPORT_FAILED}{message}")

    def promote(
        self,
        model: ModelKey,
        number: int,
        stage: str,
        *,
        user: str,
        force: bool = False,
        is_admin: bool = False,
        traffic_percent: int | None = None,
        archive: Sequence[str] = (),
        connection: Connection | None = None,
    ) -> ModelVersion:
        """Move a version to a stage (row O3); into production, the one that was there is archived with it (row O4).

        One that leaves production without a successor is not served any more (`deployments.withdraw_model`).

        `archive` names further stages whose other versions are archived too. The event says whether there is anything to
        serve: a client may put a mere pointer into production, as in MLflow, and nothing is to be deployed then.

        Raises:
            HanzoError: unknown stage; the version is quarantined (unless an admin forces it) or not exported yet.
        """
        check_stage(stage)
        tags = stage_tags(stage, traffic_percent)
        with writing(self._database, connection) as writer:
            lock_registry(writer)
            version = self.get(model, number, writer)
            check_move(version, stage, force=force, is_admin=is_admin)
            if stage == "production" and not version.servable:
                check_replaceable(version, deployments.find_serving(writer, model))
            replaced = self.in_production(model, writer) if stage == "production" else None
            vacated = ["production", *archive] if stage == "production" else list(archive)
            others = select(versions).where(
                model.row_filter(versions), versions.c.version != number, versions.c.stage.in_(vacated)
            )
            left = read_versions(writer, others)
            if version.stage == stage and not left and tags.items() <= version.tags.items():
                return version
            now = now_ms()
            for other in left:
                self._move(writer, other, "archived", now)
            self._move(writer, version, stage, now, tags)
            touch_model(writer, model)
            facts = {"version": number, "stage": stage, "run_id": version.run_id, "user_id": user}
            more = {
                "forced": force,
                "replaced": replaced.version if replaced else None,
                "archived": sorted(other.version for other in left),
                "servable": version.servable,
            }
            emit_model(writer, "model.promoted", model, {**facts, **more})
            if version.stage == "production" and stage != "production":
                deployments.withdraw_model(writer, model)
            return self.get(model, number, writer)

    def restore(self, connection: Connection, failed: ModelVersion, previous: int | None, reason: str) -> None:
        """A promotion that could not be served: back to `staging`, and the version before it back to production."""
        if self.get(failed.model, failed.version, connection).stage != "production":
            return
        now = now_ms()
        self._move(connection, failed, "none" if failed.status == "quarantined" else "staging", now)
        if previous is not None:
            self._move(connection, self.get(failed.model, previous, connection), "production", now)
        facts = {"version": failed.version, "restored": previous, "reason": reason}
        emit_model(connection, "model.restored", failed.model, facts)

    def get(self, model: ModelKey, number: int, connection: Connection) -> ModelVersion:
        found = self.find(model, number, connection)
        if found is None:
            raise version_not_found(model.name, number)
        return found

    def find(self, model: ModelKey, number: int, connection: Connection) -> ModelVersion | None:
        checked_model_name(model.name)
        if not 0 < number <= MAX_VERSION:
            return None
        return find_version(connection, model.row_filter(versions), versions.c.version == number)

    def read(self, model: ModelKey, number: int) -> ModelVersion:
        """`get` in a transaction of its own."""
        with self._database.read() as connection:
            return self.get(model, number, connection)

    def find_by_label(self, model: ModelKey, label: str, connection: Connection) -> ModelVersion | None:
        """The version that its registrar gave this number of their own."""
        named = select(version_tags.c.version).where(
            model.row_filter(version_tags), version_tags.c.key == LABEL_TAG, version_tags.c.value == label
        )
        return find_version(connection, model.row_filter(versions), versions.c.version.in_(named))

    def find_by_run(self, model: ModelKey, run_id: str, connection: Connection) -> ModelVersion | None:
        """The one version of a run that `register` made."""
        return find_version(connection, model.row_filter(versions), versions.c.sole_run_id == run_id)

    def list_by_run(self, organization: str, run_id: str, connection: Connection) -> list[ModelVersion]:
        """What `register` made of a run, under whatever name it is now."""
        row_conditions = (versions.c.organization == organization, versions.c.sole_run_id == run_id)
        return read_versions(connection, select(versions).where(*row_conditions).order_by(NEWEST_FIRST))

    def find_by_training(self, model: ModelKey, run_id: str, connection: Connection) -> ModelVersion | None:
        """The version that a training run became as this model, or under the name that the model was given since."""
        return self.find_by_run(model, run_id, connection) or next(
            iter(self.list_by_run(model.organization, run_id, connection)), None
        )

    def in_production(self, model: ModelKey, connection: Connection) -> ModelVersion | None:
        return find_version(connection, model.row_filter(versions), versions.c.stage == "production")

    def last_accepted(self, model: ModelKey, connection: Connection) -> ModelVersion | None:
        """The newest version that passed its gate, exported by now or not: what a new one is compared with (row M3)."""
        passed = versions.c.status.in_((*AWAITING_STATUSES, "ready")) & versions.c.sole_run_id.is_not(None)
        found = read_versions(connection, select(versions).where(model.row_filter(versions), passed).order_by(NEWEST_FIRST))
        return next((version for version in found if version.own_artifacts), None)  # nothing ever evaluated a mere pointer

    def _label(self, writer: Connection, model: ModelKey, following: int, label: str) -> dict[str, str]:
        """A caller's own number as a tag; a whole number is one of ours, and must be the one that comes next."""
        if label.isdecimal():
            if int(label) != following:
                raise conflict(f"version {label} is not the next one: leave it out, or give {following}")
            return {}
        if self.find_by_label(model, label, writer) is not None:
            raise already_exists(f"model '{model.name}' has a version '{printable(label)}' already: register another one")
        return dict([checked_tag(LABEL_TAG, label)])

    def _insert(
        self, connection: Connection, model: ModelKey, values: Mapping[str, Any], tags: Mapping[str, str]
    ) -> ModelVersion:
        number = next_version(connection, model)
        now = now_ms()
        empty = {"reason": "", "run_link": "", "architecture": "", "base_model": "", "method": "", "description": ""}
        row = {**empty, "artifacts": {}, "training_config": {}, **values, **model.row}
        connection.execute(insert(versions).values(**row, version=number, created_at=now, updated_at=now))
        self._set_tags(connection, model, number, tags)
        touch_model(connection, model)
        facts = {"version": number, "run_id": values["run_id"], "status": values["status"]}
        emit_model(connection, "model.registered", model, facts)
        return self.get(model, number, connection)

    def _move(
        self, connection: Connection, version: ModelVersion, stage: str, at: int, tags: Mapping[str, str] | None = None
    ) -> None:
        self._change(connection, version, stage=stage, updated_at=at)
        row_conditions = version.model.row_filter(version_tags) & (version_tags.c.version == version.version)
        connection.execute(delete(version_tags).where(row_conditions, version_tags.c.key.in_((STAGE_TAG, TRAFFIC_TAG))))
        self._set_tags(connection, version.model, version.version, tags or {})

    @staticmethod
    def _set_tags(connection: Connection, model: ModelKey, number: int, tags: Mapping[str, str]) -> None:
        rows = [{**model.row, "version": number, "key": key, "value": value} for key, value in tags.items()]
        if rows:
            connection.execute(insert(version_tags), rows)

    @staticmethod
    def _change(connection: Connection, version: ModelVersion, **values: Any) -> None:
        where = version.model.row_filter(versions) & (versions.c.version == version.version)
        connection.execute(update(versions).where(where).values(**{"updated_at": now_ms(), **values}))
