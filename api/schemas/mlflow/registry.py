"""Convert registered models, versions, stages and statuses to and from MLflow's.

MLflow has no stage canary: it is shown as Staging, with the tag `hanzo.stage` as the difference.
"""

from collections.abc import Iterable
from typing import Any

from api.schemas.mlflow.messages import pairs
from resources.errors import invalid
from resources.metadata.field_rules import printable
from resources.metadata.registry.model_versions import ModelVersion
from resources.metadata.registry.registered_model_rows import RegisteredModel

STAGES = {
    "none": "None",
    "staging": "Staging",
    "canary": "Staging",
    "production": "Production",
    "archived": "Archived",
}
ACTIVE_STAGES = ("Staging", "Production")
MLFLOW_STAGES = tuple(dict.fromkeys(STAGES.values()))


def mlflow_stage(text: str) -> str:
    """Return a stage in MLflow's spelling, ignoring case."""
    for stage in MLFLOW_STAGES:
        if stage.lower() == text.lower():
            return stage
    raise invalid(f"Invalid Model Version stage: {printable(text)}. Value must be one of {', '.join(MLFLOW_STAGES)}.")


def stages_in_mlflow_stage(stage: str) -> tuple[str, ...]:
    """Return the stages that MLflow shows as this one."""
    return tuple(ours for ours, theirs in STAGES.items() if theirs == stage)


def version_status(version: ModelVersion) -> str:
    """Return MLflow's status; a version without a pending export is ready, even without files."""
    if version.status in ("quarantined", "failed"):
        return "FAILED_REGISTRATION"
    return "PENDING_REGISTRATION" if version.is_awaiting_export else "READY"


def version_message(version: ModelVersion) -> dict[str, Any]:
    message = {
        "name": version.name,
        "version": str(version.version),
        "creation_timestamp": version.created_at,
        "last_updated_timestamp": version.updated_at,
        "user_id": version.created_by,
        "current_stage": STAGES[version.stage],
        "description": version.description,
        "source": version.source,
        "run_id": version.run_id or "",
        "status": version_status(version),
        "run_link": version.run_link,
    }
    more = {
        "status_message": version.reason,
        "model_id": version.model_id,
        "tags": pairs(version.tags),
        "aliases": list(version.aliases),
    }
    return message | {name: value for name, value in more.items() if value}


def newest_by_stage(versions: Iterable[ModelVersion]) -> list[ModelVersion]:
    """Return the newest version of each of MLflow's stages, by number."""
    newest: dict[str, ModelVersion] = {}
    for version in sorted(versions, key=lambda version: version.version):
        newest[STAGES[version.stage]] = version
    return sorted(newest.values(), key=lambda version: version.version)


def model_message(model: RegisteredModel) -> dict[str, Any]:
    message = {
        "name": model.name,
        "creation_timestamp": model.creation_time,
        "last_updated_timestamp": model.last_update_time,
    }
    more = {
        "description": model.description,
        "latest_versions": [version_message(version) for version in newest_by_stage(model.latest)],
        "tags": pairs(model.tags),
        "aliases": [{"alias": alias, "version": str(version)} for alias, version in model.aliases.items()],
    }
    return message | {name: value for name, value in more.items() if value}
