"""The stages of a version, and the rules for moving between them.

none, staging, production and archived are the specification's; `canary` is optional between staging and production. Its
intended share of traffic is stored in tags, so that MLflow's clients see it too. Pure: moves are stored by `registry`.
"""

from resources.errors import ErrorCode, HanzoError, conflict, invalid
from resources.metadata.registry.deployments import Deployment
from resources.metadata.registry.model_names import STAGE_TAG, TRAFFIC_TAG
from resources.metadata.registry.model_versions import ModelVersion

STAGES = ("none", "staging", "canary", "production", "archived")
ACTIVE_STAGES = ("staging", "canary", "production")
CANARY_TRAFFIC_PERCENT = 10
"""Default share of the traffic in percent."""


def check_stage(stage: str) -> None:
    if stage not in STAGES:
        raise invalid(f"stage '{stage}' is unknown: use one of {', '.join(STAGES)}")


def check_move(version: ModelVersion, stage: str, *, force: bool, is_admin: bool) -> None:
    """Check that a version may move to a stage.

    Raises:
        HanzoError: the version is quarantined (unless an admin forces it) or not exported yet.
    """
    if version.status == "quarantined" and stage in ACTIVE_STAGES:
        if not force:
            raise conflict(f"{version.reference} is quarantined: {version.reason}. An admin may promote it with --force")
        if not is_admin:
            raise HanzoError(ErrorCode.PERMISSION_DENIED, f"only an admin may force {version.reference}")
    if stage in ("canary", "production") and version.is_awaiting_export:
        if version.export_failure:
            raise conflict(
                f"{version.reference} has no export to serve, because its export failed: {version.export_failure}. "
                "Fix the cause and run the export again: materialize merged and gguf of its run in Dagster"
            )
        raise conflict(f"{version.reference} has no export to serve yet: wait until its export has run")


def check_replaceable(version: ModelVersion, serving: Deployment | None) -> None:
    """Check that a version without a servable file may replace the deployed version.

    As in MLflow, a version that a client registered can be promoted without one, as long as the name is not served.

    Raises:
        HanzoError: a version of the name is deployed, and its users would lose it.
    """
    if serving is not None:
        raise conflict(
            f"{version.reference} has no file that the engine serves, and version {serving.version} of {version.name} is "
            f"deployed: register a version with a GGUF, or move version {serving.version} to archived first"
        )


def check_usable(version: ModelVersion) -> None:
    """Check that a version may get an alias or be copied.

    Raises:
        HanzoError: it is quarantined, and no admin has moved it to an active stage.
    """
    if version.status == "quarantined" and version.stage not in ACTIVE_STAGES:
        raise conflict(f"{version.reference} is quarantined: {version.reason}. An admin may move it to staging with --force")


def stage_tags(stage: str, traffic_percent: int | None) -> dict[str, str]:
    """Return the tags for information that MLflow's stages cannot express."""
    if stage != "canary":
        if traffic_percent is not None:
            raise invalid(f"traffic_percent belongs to the stage canary, not to '{stage}'")
        return {}
    percent = CANARY_TRAFFIC_PERCENT if traffic_percent is None else traffic_percent
    if not 1 <= percent <= 99:
        raise invalid(f"traffic_percent must be from 1 to 99, not {percent}")
    return {STAGE_TAG: stage, TRAFFIC_TAG: str(percent)}
