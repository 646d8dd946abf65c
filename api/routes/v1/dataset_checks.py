"""/v1/datasets/{id}/checks and /report: results of checking a version."""

from typing import Any, cast

from fastapi import Response
from fastapi.responses import HTMLResponse
from typing_extensions import TypedDict

from api.auth.permissions import Permission
from api.dependencies import DatabaseDep, StoreDep
from api.json_bodies import TypedResponse, json_response
from api.routing import Audit, Router
from api.schemas.v1.datasets import CheckStatus, find_version, reporting_data_loss
from recipes.contracts.validation_results import STATISTICS_FILE, Drift, Leaks, Statistics, Violations
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.datasets.check_verdicts import Verdict
from resources.datasets.validations import CHECK_REQUESTED_EVENT, NOT_CHECKED, Validation, Validations
from resources.errors import HanzoError, conflict
from resources.metadata.database import Database
from resources.metadata.dataset_problems import DatasetProblem, find_problems
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.outbox import emit


class UncheckedDataset(TypedDict):
    """`checks` and `blocked` are empty and `checked_at` is null until the version is checked.

    `problem` is why the last attempt to check or split it failed, at `problem_at`.
    """

    dataset_id: str
    name: str
    version: int
    problem: str
    problem_at: int | None
    status: CheckStatus
    blocked: str
    checks: list[Verdict]
    checked_at: int | None


class CheckedDataset(UncheckedDataset):
    """`drift` is null without a reference to compare with, `leaks` until the version is split."""

    violations: Violations
    drift: Drift | None
    leaks: Leaks | None
    statistics: Artifact


class CheckRequested(TypedDict):
    """`event` is the `seq` of the event that requests the check."""

    dataset_id: str
    event: int


router = Router("/v1/datasets", tag="v1")


@router.get("/{dataset_id}/checks", Permission.DATASETS_READ, audit=Audit.EACH)
def checks(dataset_id: str, database: DatabaseDep) -> TypedResponse[UncheckedDataset | CheckedDataset]:
    """Return the verdicts and their evidence.

    `status` is pending, passed, failed (which stops nothing) or blocked. `problem` is why the last attempt to check or
    split the version failed, at `problem_at`.
    """
    version = find_version(database, dataset_id)
    with database.read() as connection:
        found = Validations(database).find(version.id, connection)
        problem = find_problems(connection, [version.id]).get(version.id)
    return json_response(checks_json(version, found, problem))


@router.post("/{dataset_id}/checks", Permission.DATASETS_WRITE, status_code=202)
def check_again(dataset_id: str, database: DatabaseDep) -> TypedResponse[CheckRequested]:
    """Request another check, by the current contract and against models in use."""
    version = find_version(database, dataset_id)
    with database.write() as connection:
        facts = {"dataset_id": version.id, "name": version.name, "version": version.version}
        event = emit(connection, "datasets", CHECK_REQUESTED_EVENT, version.name, facts)
    return json_response({"dataset_id": version.id, "event": event}, 202)


@router.get("/{dataset_id}/report", Permission.DATASETS_READ, audit=Audit.EACH, produces="text/html")
def read_report(dataset_id: str, database: DatabaseDep, store: StoreDep) -> Response:
    """Render one self-contained HTML page. 409 before the first check."""
    # Imported late: numpy and jinja2 would slow the server's start.
    from resources.datasets.validation_report import SECURITY_POLICY, render_report

    version = find_version(database, dataset_id)
    with database.read() as connection:
        found = Validations(database).find(version.id, connection)
    if found is None:
        raise conflict(f"dataset {version.reference} was not checked yet: see `hanzo-ml dataset check {version.reference}`")
    with reporting_data_loss(f"the check results of dataset {version.reference}"):
        statistics = read_statistics(store, found.statistics)
    page = render_report(version, found, statistics, reference_statistics(database, store, version, found))
    return HTMLResponse(page, headers={"Content-Security-Policy": SECURITY_POLICY, "X-Content-Type-Options": "nosniff"})


def reference_statistics(database: Database, store: Store, version: DatasetVersion, found: Validation) -> Statistics | None:
    """Return the statistics that the version was compared with, if they still exist."""
    if not found.reference:
        return None
    try:
        reference = Datasets(database).read(found.reference, version.organization)
        with database.read() as connection:
            validation = Validations(database).find(reference.id, connection)
        return read_statistics(store, validation.statistics) if validation is not None else None
    except (HanzoError, FileNotFoundError):
        return None


def read_statistics(store: Store, artifact: Artifact) -> Statistics:
    return Statistics.model_validate_json(store.get_bytes(f"{artifact.uri}/{STATISTICS_FILE}"))


def checks_json(
    version: DatasetVersion, found: Validation | None, problem: DatasetProblem | None
) -> UncheckedDataset | CheckedDataset:
    about: dict[str, Any] = {
        "dataset_id": version.id,
        "name": version.name,
        "version": version.version,
        "problem": problem.problem if problem else "",
        "problem_at": problem.told_at if problem else None,
    }
    if found is None:
        return cast(UncheckedDataset, {**about, **vars(NOT_CHECKED), "checks": [], "checked_at": None})
    return cast(
        CheckedDataset,
        {
            **about,
            **vars(found.standing),
            "checks": found.verdicts,
            "violations": found.facts.violations,
            "drift": found.facts.drift,
            "leaks": found.leaks,
            "statistics": found.statistics,
            "checked_at": found.checked_at,
        },
    )
