"""The stages of a version, and the rules of moving between them (rows O3, O4, O7, Z5).

none, staging, production and archived are the specification's; `canary` is optional between staging and production and
carries the share of the traffic that it is meant to get, as tags, so that MLflow's clients see them too.
Pure: what a move does to the tables is `registry`.
"""

from resources.errors import ErrorCode, HanzoError, conflict, invalid
from resources.metadata.registry.deployments import Deployment
from resources.metadata.registry.model_names import STAGE_TAG, TRAFFIC_TAG
from resources.metadata.registry.model_versions import ModelVersion

STAGES = ("none", "staging", "canary", "production", "archived")
ACTIVE_STAGES = ("staging", "canary", "production")
CANARY_TRAFFIC_PERCENT = 10
"""Percent of the traffic, where nobody says more."""


def check_stage(stage: str) -> None:
    if stage not in STAGES:
        raise invalid(f"stage '{stage}' is unknown: use one of {', '.join(STAGES)}")


def check_move(version: ModelVersion, stage: str, *, force: bool, is_admin: bool) -> None:
    """Whether a version may go to a stage.

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
                "Run the export again once that is mended: materialize merged and gguf of its run in Dagster"
            )
        raise conflict(f"{version.reference} has no export to serve yet: wait until its export has run")


def check_replaceable(version: ModelVersion, serving: Deployment | None) -> None:
    """Whether a version without a file to serve may take the place of what is deployed under its name.

    A version that a client registers is promotable without one, as in MLflow, as long as nothing serves the name.

    Raises:
        HanzoError: a version of the name is deployed, and would be taken from its users.
    """
    if serving is not None:
        raise conflict(
            f"{version.reference} has no file that the engine serves, and version {serving.version} of {version.name} is "
            f"deployed: register a version with a GGUF, or move version {serving.version} to archived first"
        )


def check_usable(version: ModelVersion) -> None:
    """Whether a version may be given a name that loaders ask for, or be copied.

    Raises:
        HanzoError: it is quarantined, and no admin has moved it to a stage where it is used.
    """
    if version.status == "quarantined" and version.stage not in ACTIVE_STAGES:
        raise conflict(f"{version.reference} is quarantined: {version.reason}. An admin may move it to staging with --force")


def stage_tags(stage: str, traffic_percent: int | None) -> dict[str, str]:
    """The tags that say what a stage of MLflow's cannot."""
    if stage != "canary":
        if traffic_percent is not None:
            raise invalid(f"traffic_percent belongs to the stage canary, not to '{stage}'")
        return {}
    percent = CANARY_TRAFFIC_PERCENT if traffic_percent is None else traffic_percent
    if not 1 <= percent <= 99:
        raise invalid(f"traffic_percent must be from 1 to 99, not {percent}")
    return {STAGE_TAG: stage, TRAFFIC_TAG: str(percent)}
