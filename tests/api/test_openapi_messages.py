"""The messages of the document against the types that answers are made of, in each of their fields: other tests have no
answer of some of them, such as a broken proof.
"""

from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from pydantic import BaseModel

from api.openapi.v1 import (
    artifacts,
    dataset_checks,
    dataset_lineage,
    datasets,
    estimates,
    events,
    jobs,
    models,
    proofs,
    replays,
    sweeps,
)
from api.schemas.mlflow.responses import Message
from recipes.manifest import Artifact
from recipes.memory import MemoryBudget
from recipes.results import EvaluationReport, ModelScores
from recipes.schema import Hardware
from recipes.throughput import Range
from recipes.validation import findings
from resources import dataset_diff
from resources.estimate.estimate import DatasetTokens
from resources.hpo import config, space
from resources.hpo.trial import Trial
from resources.lineage import datasets as lineage
from resources.lineage import match, prove, trace, trace_tree, training_data
from resources.metadata import outbox
from resources.metadata.datasets import DatasetVersion
from resources.metadata.heartbeats import Heartbeat
from resources.metadata.jobs import JobRecord
from resources.metadata.registry.deployments import Deployment
from resources.metadata.registry.model_stages import STAGES
from resources.metadata.registry.model_versions import LoggedFiles, ModelVersion
from resources.metadata.validations import Standing
from resources.replay import comparison, environment, healing, verdict
from resources.validation.judge import Verdict
from resources.validation.policy import Check

MADE_OF: list[tuple[type[Message], type]] = [
    (artifacts.Artifact, Artifact),
    (datasets.DatasetVersion, DatasetVersion),
    (datasets.CheckStanding, Standing),
    (dataset_checks.CheckVerdict, Verdict),
    (dataset_checks.BrokenRule, findings.Violation),
    (dataset_checks.BrokenRules, findings.Violations),
    (dataset_checks.FeatureDrift, findings.FeatureDrift),
    (dataset_checks.DatasetDrift, findings.Drift),
    (dataset_checks.Leak, findings.Leak),
    (dataset_checks.Leaks, findings.Leaks),
    (dataset_lineage.DiffedVersion, dataset_diff.Statistics),
    (dataset_lineage.DatasetDiff, dataset_diff.Diff),
    (dataset_lineage.LineageNode, lineage.Made),
    (dataset_lineage.DatasetLineage, lineage.Lineage),
    (dataset_lineage.TraceNode, trace_tree.TraceNode),
    (dataset_lineage.RecordTrace, trace.Trace),
    (dataset_lineage.RecordMatches, match.Matches),
    (proofs.ProofNode, prove.ProofNode),
    (proofs.Proof, prove.Proof),
    (proofs.PersonalData, training_data.PersonalData),
    (proofs.UsedDataset, training_data.DataUse),
    (proofs.NamedDataset, training_data.LoggedDataset),
    (proofs.TrainingData, training_data.TrainingData),
    (replays.EnvironmentDifference, environment.Difference),
    (replays.StepDifference, comparison.StepDifference),
    (replays.FileDifference, comparison.FileDifference),
    (replays.UnrepeatedIncident, healing.Unrepeated),
    (replays.ReplayVerdict, verdict.Verdict),
    (jobs.Job, JobRecord),
    (jobs.ModelScores, ModelScores),
    (jobs.EvaluationReport, EvaluationReport),
    (estimates.TokenCount, DatasetTokens),
    (estimates.MemoryParts, MemoryBudget),
    (estimates.Bounds, Range),
    (sweeps.SweepObjective, config.Objective),
    (sweeps.SweepEarlyStopping, config.EarlyStopping),
    (sweeps.SweepHalving, config.Halving),
    (sweeps.SweepPopulation, config.Population),
    (sweeps.SweepConfiguration, config.SweepConfig),
    (sweeps.TrialResources, Hardware),
    (sweeps.Trial, Trial),
    (models.ModelFiles, LoggedFiles),
    (models.ModelVersion, ModelVersion),
    (models.Deployment, Deployment),
    (events.Event, outbox.Event),
    (events.AuditEvent, outbox.Event),
    (events.Heartbeat, Heartbeat),
]


@pytest.mark.parametrize(("message", "made_of"), MADE_OF, ids=lambda each: each.__name__)
def test_a_message_has_every_field_of_what_it_tells_and_null_where_that_has_none(
    message: type[Message], made_of: type
) -> None:
    told = get_type_hints(message)
    for name, annotation in fields_of(made_of).items():
        assert name in told, name
        if NoneType in get_args(annotation):
            assert told[name] is Any or NoneType in get_args(told[name]), f"{name} may be null"
        assert not literals(annotation) or literals(annotation) <= literals(told[name]), name


def fields_of(made_of: type) -> dict[str, Any]:
    """JSON of a dataclass or a model of pydantic has these, and no other."""
    if is_dataclass(made_of):
        hints = get_type_hints(made_of)
        return {field.name: hints[field.name] for field in fields(made_of)}
    assert issubclass(made_of, BaseModel)
    return {name: field.annotation for name, field in made_of.model_fields.items()}


def literals(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {each for part in get_args(annotation) for each in literals(part) if get_origin(part) is Literal}


def test_the_words_of_the_document_are_those_of_the_code() -> None:
    assert literals(get_type_hints(dataset_checks.CheckVerdict)["check"]) == set(Check)
    assert set(get_args(proofs.Included)) == set(training_data.Included)
    assert literals(get_type_hints(models.ModelVersion)["stage"]) == set(STAGES)
    kinds = {"uniform": space.Uniform, "log_uniform": space.LogUniform, "choice": space.Choice}
    for told in get_args(get_args(get_type_hints(sweeps.SweepConfiguration)["search_space"])[1]):
        assert issubclass(told, msgspec.Struct)
        kind = kinds.pop(told.__struct_config__.tag)
        assert {*get_type_hints(told), "type"} - {"__struct_config__"} >= fields_of(kind).keys()
    assert not kinds
