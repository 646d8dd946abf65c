"""Registered models and their versions: pointers, checksums and stages, never weights (specification rows O1-O5).

At most one version of a name is in production at any moment; promoting archives the one before it in the same
transaction. What is really served is the deployments' record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, insert, select, tuple_, update

from recipes.schema import Artifact
from resources.errors import ErrorCode, HanzoError, conflict, invalid, not_found
from resources.metadata.database import Database
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import model_version_tags as version_tags
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_model_tags as model_tags
from resources.metadata.tables import registered_models as models
from resources.metadata.transactions import insert_into

STAGES = ("none", "staging", "production", "archived")
NEWEST_FIRST = versions.c.version.desc()


@dataclass(frozen=True)
class ModelVersion:
    """One version. `artifacts` maps a format to `{path, size_bytes, checksum, artifact}`."""

    name: str
    version: int
    stage: str
    status: str
    reason: str
    run_id: str | None
    sole_run_id: str | None
    model_id: str | None
    run_link: str
    architecture: str
    base_model: str
    method: str
    artifacts: Mapping[str, Any]
    metrics: Mapping[str, float]
    training_config: Mapping[str, Any]
    source: str
    description: str
    created_at: int
    created_by: str
    updated_at: int
    tags: Mapping[str, str]

    @property
    def reference(self) -> str:
        return f"{self.name} version {self.version}"

    def artifact(self, format: str) -> Artifact:
        """The artifact of a format. Raises when the version has none."""
        if format not in self.artifacts:
            has = ", ".join(self.artifacts) or "nothing"
            raise conflict(f"{self.reference} has no {format} yet (it has {has})")
        return Artifact.model_validate(self.artifacts[format]["artifact"])


@dataclass(frozen=True)
class Registration:
    """What a new version says of itself."""

    run_id: str
    architecture: str
    base_model: str
    method: str
    metrics: Mapping[str, float]
    training_config: Mapping[str, Any]
    source: str
    created_by: str
    tags: Mapping[str, str]


def described(artifact: Artifact) -> dict[str, Any]:
    """An artifact in the specification's words, with the pointer beside it."""
    return {
        "path": artifact.uri + "/",
        "size_bytes": artifact.size_bytes,
        "checksum": f"sha256:{artifact.digest}",
        "artifact": artifact.model_dump(),
    }


def next_version(connection: Connection, name: str) -> int:
    """The next number of a model, given out once: it is rolled back with its version, and never used again after one."""
    number = update(models).where(models.c.name == name).values(last_version=models.c.last_version + 1)
    return int(connection.execute(number.returning(models.c.last_version)).scalar_one())


def read_versions(connection: Connection, query: Select[Any]) -> list[ModelVersion]:
    """The versions that a query over their table finds, with their tags."""
    rows = connection.execute(query).mappings().all()
    keys = [(row["name"], row["version"]) for row in rows]
    tags: dict[tuple[str, int], dict[str, str]] = {key: {} for key in keys}
    wanted = tuple_(version_tags.c.name, version_tags.c.version).in_(keys)
    for tag in connection.execute(select(version_tags).where(wanted).order_by(version_tags.c.key)).mappings():
        tags[tag["name"], tag["version"]][tag["key"]] = tag["value"]
    return [ModelVersion(**row, tags=tags[key]) for row, key in zip(rows, keys, strict=True)]


class Registry:
    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure_model(self, connection: Connection, name: str, organization: str) -> None:
        """The registered model of that name, made when it is missing."""
        if not name or "/" in name or ":" in name:
            raise invalid(f"model name '{name}' is not allowed: it must not be empty nor hold '/' or ':'")
        now = now_ms()
        row = {"name": name, "organization": organization, "creation_time": now, "last_update_time": now}
        made = insert_into(connection, models).values(**row, description="", last_version=0)
        connection.execute(made.on_conflict_do_nothing())

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
        number = next_version(connection, name)
        now = now_ms()
        values = {key: value for key, value in vars(registration).items() if key != "tags"} | {
            "name": name,
            "version": number,
            "sole_run_id": registration.run_id,
            "run_link": "",
            "stage": "none" if quarantine else stage,
            "status": "quarantined" if quarantine else "pending",
            "reason": quarantine or "",
            "artifacts": {format: described(artifact) for format, artifact in artifacts.items()},
            "description": "",
            "created_at": now,
            "updated_at": now,
        }
        connection.execute(insert(versions).values(**values))
        tags = [{"name": name, "version": number, "key": key, "value": text} for key, text in registration.tags.items()]
        if tags:
            connection.execute(insert(version_tags), tags)
        facts = {"name": name, "version": number, "run_id": registration.run_id, "status": values["status"]}
        emit(connection, "models", "model.registered", name, facts)
        return self.get(name, number, connection)

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
        self, name: str, number: int, stage: str, *, user: str, force: bool = False, is_admin: bool = False
    ) -> ModelVersion:
        """Move a version to a stage (row O3); into production, the one that was there is archived with it (row O4).

        Raises:
            HanzoError: unknown stage; the version is quarantined (unless an admin forces it) or not exported yet.
        """
        if stage not in STAGES:
            raise invalid(f"stage '{stage}' is unknown: use one of {', '.join(STAGES)}")
        with self._database.write() as connection:
            version = self.get(name, number, connection)
            if version.status == "quarantined" and stage in ("staging", "production"):
                if not force:
                    raise conflict(
                        f"{version.reference} is quarantined: {version.reason}. An admin may promote it with --force"
                    )
                if not is_admin:
                    raise HanzoError(ErrorCode.PERMISSION_DENIED, f"only an admin may force {version.reference}")
            if stage == "production" and "gguf" not in version.artifacts:
                raise conflict(f"{version.reference} has no export to serve yet: wait until its export has run")
            if version.stage == stage:
                return version
            replaced = self.in_production(name, connection) if stage == "production" else None
            if replaced is not None:
                self._change(connection, replaced, stage="archived")
            self._change(connection, version, stage=stage)
            facts = {"name": name, "version": number, "stage": stage, "run_id": version.run_id, "user_id": user}
            replaced_version = replaced.version if replaced else None
            emit(connection, "models", "model.promoted", name, {**facts, "forced": force, "replaced": replaced_version})
            return self.get(name, number, connection)

    def restore(self, connection: Connection, failed: ModelVersion, previous: int | None, reason: str) -> None:
        """A promotion that could not be served: back to `staging`, and the version before it back to production."""
        if self.get(failed.name, failed.version, connection).stage != "production":
            return
        self._change(connection, failed, stage="none" if failed.status == "quarantined" else "staging")
        if previous is not None:
            self._change(connection, self.get(failed.name, previous, connection), stage="production")
        facts = {"name": failed.name, "version": failed.version, "restored": previous, "reason": reason}
        emit(connection, "models", "model.restored", failed.name, facts)

    def get(self, name: str, number: int, connection: Connection) -> ModelVersion:
        found = self._first(connection, versions.c.name == name, versions.c.version == number)
        if found is None:
            raise not_found(f"model '{name}' has no version {number}: see `hanzo-ml model list`")
        return found

    def read(self, name: str, number: int) -> ModelVersion:
        """`get` in a transaction of its own."""
        with self._database.read() as connection:
            return self.get(name, number, connection)

    def of_run(self, name: str, run_id: str, connection: Connection) -> ModelVersion | None:
        """The one version of a run that `register` made."""
        return self._first(connection, versions.c.name == name, versions.c.sole_run_id == run_id)

    def in_production(self, name: str, connection: Connection) -> ModelVersion | None:
        return self._first(connection, versions.c.name == name, versions.c.stage == "production")

    def last_accepted(self, name: str, connection: Connection) -> ModelVersion | None:
        """The newest version that passed its gate: what a new one is compared with (row M3)."""
        return self._first(connection, versions.c.name == name, versions.c.status == "ready")

    def models(self, organization: str) -> Sequence[Mapping[str, Any]]:
        query = select(models).where(models.c.organization == organization).order_by(models.c.name)
        with self._database.read() as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
            tags = connection.execute(select(model_tags)).mappings().all()
        return [row | {"tags": {tag["key"]: tag["value"] for tag in tags if tag["name"] == row["name"]}} for row in rows]

    def versions(self, name: str) -> list[ModelVersion]:
        """All versions of a model, newest first. Raises when there is no such model."""
        with self._database.read() as connection:
            if connection.execute(select(models.c.name).where(models.c.name == name)).first() is None:
                raise not_found(f"there is no model '{name}': see `hanzo-ml model list`")
            return read_versions(connection, select(versions).where(versions.c.name == name).order_by(NEWEST_FIRST))

    @staticmethod
    def _first(connection: Connection, *conditions: ColumnElement[bool]) -> ModelVersion | None:
        query = select(versions).where(*conditions).order_by(NEWEST_FIRST).limit(1)
        return next(iter(read_versions(connection, query)), None)

    @staticmethod
    def _change(connection: Connection, version: ModelVersion, **values: Any) -> None:
        where = (versions.c.name == version.name) & (versions.c.version == version.version)
        connection.execute(update(versions).where(where).values(**values, updated_at=now_ms()))
