"""The registry: create versions and move them between stages. Stores pointers and checksums, never weights.

At most one version of a name is in production at any moment; promoting archives the previous one in the same transaction.
`deployments` records what is actually served, `registered_models` models, tags and aliases.
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
"""Statuses of a version that passed its gate and has no export: not attempted yet, or the last one failed."""


@dataclass(frozen=True)
class SourceDescription:
    """Known properties of files that a client refers to; unknown ones are empty."""

    architecture: str = ""
    base_model: str = ""
    method: str = ""
    artifacts: Mapping[str, LoggedFiles] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    training_config: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientVersion(SourceDescription):
    """A version that a client registers, with existing files and an already checked source."""

    source: str
    created_by: str
    run_id: str | None = None
    model_id: str | None = None
    run_link: str = ""
    description: str = ""
    label: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


def next_version(connection: Connection, model: ModelKey) -> int:
    """Return a model's next version number; never reused, but rolled back with its version."""
    number = update(models).where(model.row_filter(models)).values(last_version=models.c.last_version + 1)
    return int(connection.execute(number.returning(models.c.last_version)).scalar_one())


class Registry:
    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure_model(self, connection: Connection, model: ModelKey) -> None:
        """Create the registered model if it is missing."""
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
        """Register a run's version, in a stage or quarantined with the reason.

        A run has at most one version per name, so registering again returns it.
        """
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
        """Create the next version of a model from a client's files; ready at once.

        A run may have any number of these.
        """
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
        """Add exports to a version; if it was awaiting its export, it becomes ready.

        Raises:
            HanzoError: 409 if the version has other content in one of these formats: registered files never change.
        """
        for format, artifact in artifacts.items():
            if (
                format in version.artifacts
                and version.artifacts[format].get("checksum") != artifact_row(artifact)["checksum"]
            ):
                raise conflict(f"{version.reference} already has a {format} with other content: add it as another format")
        stored = dict(version.artifacts) | {format: artifact_row(artifact) for format, artifact in artifacts.items()}
        status = "ready" if version.status in AWAITING_STATUSES else version.status
        if stored == dict(version.artifacts) and status == version.status:
            return
        self._change(connection, version, artifacts=stored, status=status, reason=version.gate_reason)
        emit_model(connection, "model.exported", version.model, {"version": version.version, "formats": sorted(stored)})

    def begin_export(self, connection: Connection, version: ModelVersion) -> None:
        """Clear the failure of the previous export, because a new one begins."""
        status = "pending" if version.status == "failed" else version.status
        reason = version.gate_reason
        if (status, reason) != (version.status, version.reason):
            self._change(connection, version, status=status, reason=reason)

    def fail_export(self, connection: Connection, version: ModelVersion, reason: str) -> None:
        """Record why a version has nothing to serve; no change if another export succeeded."""
        current = self.get(version.model, version.version, connection)
        if not current.is_awaiting_export:
            return
        message = " ".join(reason.split())
        if current.status in AWAITING_STATUSES:
            self._change(connection, current, status="failed", reason=message)
        elif current.status == "quarantined":  # keep the status until an admin promotes it
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
        """Move a version to a stage; a move into production archives the previous version.

        A version that leaves production without a successor is no longer served (`deployments.withdraw_model`).

        `archive` names further stages whose other versions are archived too. The event states whether the version is
        servable: a client may promote one without files, as in MLflow, which is then not deployed.

        Raises:
            HanzoError: the stage is unknown; the version is quarantined (unless an admin forces it) or not exported yet.
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
        """Undo a failed promotion: back to staging, and the previous version to production."""
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
        """Call `get` in a transaction of its own."""
        with self._database.read() as connection:
            return self.get(model, number, connection)

    def find_by_label(self, model: ModelKey, label: str, connection: Connection) -> ModelVersion | None:
        """Return the version with this caller-chosen number, or None."""
        named = select(version_tags.c.version).where(
            model.row_filter(version_tags), version_tags.c.key == LABEL_TAG, version_tags.c.value == label
        )
        return find_version(connection, model.row_filter(versions), versions.c.version.in_(named))

    def find_by_run(self, model: ModelKey, run_id: str, connection: Connection) -> ModelVersion | None:
        """Return the only version of a run that `register` created, or None."""
        return find_version(connection, model.row_filter(versions), versions.c.sole_run_id == run_id)

    def list_by_run(self, organization: str, run_id: str, connection: Connection) -> list[ModelVersion]:
        """Return the versions that `register` created from a run, under any current model name."""
        row_conditions = (versions.c.organization == organization, versions.c.sole_run_id == run_id)
        return read_versions(connection, select(versions).where(*row_conditions).order_by(NEWEST_FIRST))

    def find_by_training(self, model: ModelKey, run_id: str, connection: Connection) -> ModelVersion | None:
        """Return a training run's version, even if the model was renamed since."""
        return self.find_by_run(model, run_id, connection) or next(
            iter(self.list_by_run(model.organization, run_id, connection)), None
        )

    def in_production(self, model: ModelKey, connection: Connection) -> ModelVersion | None:
        return find_version(connection, model.row_filter(versions), versions.c.stage == "production")

    def last_accepted(self, model: ModelKey, connection: Connection) -> ModelVersion | None:
        """Return the newest version that passed its gate: the baseline for new ones."""
        passed = versions.c.status.in_((*AWAITING_STATUSES, "ready")) & versions.c.sole_run_id.is_not(None)
        found = read_versions(connection, select(versions).where(model.row_filter(versions), passed).order_by(NEWEST_FIRST))
        return next((version for version in found if version.own_artifacts), None)  # clients' versions were never evaluated

    def _label(self, writer: Connection, model: ModelKey, following: int, label: str) -> dict[str, str]:
        """Return a caller-chosen version number as a tag.

        A whole number must be the next version number, and needs no tag.
        """
        if label.isdecimal():
            if int(label) != following:
                raise conflict(f"version {label} is not the next version number: omit it, or use {following}")
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
