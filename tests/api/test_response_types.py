"""Response types have the fields of the records that they are built from.

Other tests have no response of some of them, such as a version that was never deployed. Types of `resources` that are sent
unchanged need no such test.
"""

from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from typing_extensions import get_type_hints

from api.routes.v1 import audit, datasets, events, job_estimate
from api.schemas.v1 import datasets as dataset_schemas
from api.schemas.v1 import jobs, models, sweeps
from recipes.planning.hardware_fit import HardwareFit
from resources.datasets import diff
from resources.datasets.validations import CheckStatus
from resources.hpo.trial import Trial
from resources.lineage.dataset_lineage import Lineage
from resources.metadata import outbox
from resources.metadata.datasets import DatasetVersion
from resources.metadata.jobs import JobRecord
from resources.metadata.registry.deployments import Deployment
from resources.metadata.registry.model_versions import LoggedFiles, ModelVersion
from resources.metadata.registry.stage_rules import STAGES
from resources.monitoring.service_heartbeats import Heartbeat

NOT_SENT = {HardwareFit: {"budget", "fits", "paged", "room"}}
MADE_OF: list[tuple[type, type]] = [
    (dataset_schemas.DatasetVersion, DatasetVersion),
    (dataset_schemas.CheckStanding, CheckStatus),
    (datasets.DiffedVersion, diff.VersionStatistics),
    (datasets.DatasetDiff, diff.Diff),
    (datasets.DatasetLineage, Lineage),
    (jobs.Job, JobRecord),
    (job_estimate.NeededMemory, HardwareFit),
    (sweeps.Trial, Trial),
    (models.ModelFiles, LoggedFiles),
    (models.ModelVersion, ModelVersion),
    (models.Deployment, Deployment),
    (events.Event, outbox.Event),
    (audit.AuditEvent, outbox.Event),
    (events.Heartbeat, Heartbeat),
]


@pytest.mark.parametrize(("message", "made_of"), MADE_OF, ids=lambda each: each.__name__)
def test_response_type_declares_every_field_of_its_record_with_the_same_nullability(message: type, made_of: type) -> None:
    declared = get_type_hints(message)
    for name, annotation in fields_of(made_of).items():
        if name in NOT_SENT.get(made_of, ()):
            continue
        assert name in declared, name
        if NoneType in get_args(annotation):
            assert declared[name] is Any or NoneType in get_args(declared[name]), f"{name} may be null"
        assert not literals(annotation) or literals(annotation) <= literals(declared[name]), name


def fields_of(made_of: type) -> dict[str, Any]:
    """Return the JSON fields of a dataclass or pydantic model."""
    if is_dataclass(made_of):
        hints = get_type_hints(made_of)
        return {field.name: hints[field.name] for field in fields(made_of)}
    assert issubclass(made_of, BaseModel)
    return {name: field.annotation for name, field in made_of.model_fields.items()}


def literals(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {each for part in get_args(annotation) for each in literals(part) if get_origin(part) is Literal}


def test_documented_stages_equal_the_stages_in_code() -> None:
    assert literals(get_type_hints(models.ModelVersion)["stage"]) == set(STAGES)
