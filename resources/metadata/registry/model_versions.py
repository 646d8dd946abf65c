"""Records of a model's versions, read with their tags and aliases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, select, tuple_

from recipes.storage.manifest import Artifact
from resources.errors import conflict
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.tables import model_aliases as aliases
from resources.metadata.tables import model_version_tags as version_tags
from resources.metadata.tables import model_versions as versions

EXPORT_FAILED = "; its export failed: "
"""Separates the reason of a quarantine from that of a failed export."""
NEWEST_FIRST = versions.c.version.desc()
CHUNK = 500
"""Versions whose tags are read by one query: each takes three variables, and SQLite allows 32,766."""


@dataclass(frozen=True)
class ModelVersion:
    """One version.

    `artifacts` maps a format to `{path, size_bytes, checksum}`, plus `artifact` if the asset graph made it.
    """

    organization: str
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
    aliases: tuple[str, ...] = ()

    @property
    def model(self) -> ModelKey:
        return ModelKey(self.organization, self.name)

    @property
    def reference(self) -> str:
        return f"{self.name} version {self.version}"

    @property
    def servable(self) -> bool:
        """Whether it has a file that the engine can load."""
        return "gguf" in self.artifacts

    @property
    def own_artifacts(self) -> dict[str, Artifact]:
        """The artifacts made by the asset graph, by format, without files that a client logged."""
        return own_artifacts(self.artifacts)

    @property
    def is_awaiting_export(self) -> bool:
        """Whether it was trained here and not exported yet: clients' versions are never exported."""
        return not self.servable and any("artifact" in each for each in self.artifacts.values())

    @property
    def export_failure(self) -> str:
        """Why its last export failed; empty if it did not."""
        return self.reason if self.status == "failed" else self.reason.partition(EXPORT_FAILED)[2]

    @property
    def gate_reason(self) -> str:
        """Why it is quarantined; empty if it is not."""
        return "" if self.status == "failed" else self.reason.partition(EXPORT_FAILED)[0]

    def artifact(self, format: str) -> Artifact:
        """Return the artifact of a format. Raises if the version has none."""
        made = self.own_artifacts
        if format not in made:
            has = ", ".join(self.artifacts) or "nothing"
            raise conflict(f"{self.reference} has no {format} yet (it has {has})")
        return made[format]


@dataclass(frozen=True)
class Registration:
    """The metadata of a new version."""

    run_id: str
    architecture: str
    base_model: str
    method: str
    metrics: Mapping[str, float]
    training_config: Mapping[str, Any]
    source: str
    created_by: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class LoggedFiles:
    """Files of a format that a client logged: without manifest, perhaps without checksum.

    `flavors` are the ways in which MLflow can load them.
    """

    path: str
    size_bytes: int
    checksum: str | None
    flavors: Sequence[str] = ()


def artifact_row(artifact: Artifact | LoggedFiles) -> dict[str, Any]:
    """Return an artifact in the specification's form, with its pointer if it has one."""
    if isinstance(artifact, LoggedFiles):
        row_values = {"path": artifact.path, "size_bytes": artifact.size_bytes, "checksum": artifact.checksum}
        return row_values | ({"flavors": list(artifact.flavors)} if artifact.flavors else {})
    return {
        "path": artifact.uri + "/",
        "size_bytes": artifact.size_bytes,
        "checksum": f"sha256:{artifact.digest}",
        "artifact": artifact.model_dump(),
    }


def own_artifacts(artifacts: Mapping[str, Any]) -> dict[str, Artifact]:
    """Return the pointers of the formats that have one."""
    return {format: Artifact.model_validate(each["artifact"]) for format, each in artifacts.items() if "artifact" in each}


def read_versions(connection: Connection, query: Select[Any]) -> list[ModelVersion]:
    """Return the versions that a query finds, with their tags and aliases."""
    rows = connection.execute(query).mappings().all()
    found: list[ModelVersion] = []
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        keys = [(row["organization"], row["name"], row["version"]) for row in part]
        tags: dict[tuple[str, str, int], dict[str, str]] = {key: {} for key in keys}
        named: dict[tuple[str, str, int], list[str]] = {key: [] for key in keys}
        wanted = tuple_(version_tags.c.organization, version_tags.c.name, version_tags.c.version).in_(keys)
        for tag in connection.execute(select(version_tags).where(wanted).order_by(version_tags.c.key)):
            tags[tag.organization, tag.name, tag.version][tag.key] = tag.value
        pointing = tuple_(aliases.c.organization, aliases.c.name, aliases.c.version).in_(keys)
        for alias in connection.execute(select(aliases).where(pointing).order_by(aliases.c.alias)):
            named[alias.organization, alias.name, alias.version].append(alias.alias)
        found += [
            ModelVersion(**row, tags=tags[key], aliases=tuple(named[key])) for row, key in zip(part, keys, strict=True)
        ]
    return found


def find_version(connection: Connection, *conditions: ColumnElement[bool]) -> ModelVersion | None:
    """Return the newest version that meets all conditions."""
    query = select(versions).where(*conditions).order_by(NEWEST_FIRST).limit(1)
    return next(iter(read_versions(connection, query)), None)
