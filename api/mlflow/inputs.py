"""Inputs of runs over MLflow's API: logging datasets and models that a run read, and listing an experiment's datasets."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from api.dependencies import CallerOf, TrackingOf
from api.schemas.mlflow.messages import answer, experiment_number
from api.schemas.mlflow.requests import Message, OfRun, Required
from api.strict_json import StrictRoute
from resources.errors import invalid
from resources.metadata.tracking.inputs import Dataset, DatasetInput, DatasetSummary
from resources.metadata.tracking.tracking import Tracking

MAX_EXPERIMENTS = 20

router = APIRouter(prefix="/mlflow", tags=["mlflow"], route_class=StrictRoute)
stock_paths = APIRouter(tags=["mlflow"], route_class=StrictRoute)
"""A slash is missing in MLflow's own definition of one path, so its clients ask there."""


class InputTag(Message):
    key: str
    value: str = ""


class DatasetBody(Message):
    name: Required
    digest: Required
    source_type: str = ""
    source: str = ""
    columns: Annotated[str | None, Field(validation_alias="schema")] = None
    profile: str | None = None


class DatasetInputBody(Message):
    dataset: DatasetBody
    tags: tuple[InputTag, ...] = ()

    def logged(self) -> DatasetInput:
        named = self.dataset
        dataset = Dataset(named.name, named.digest, named.source_type, named.source, named.columns, named.profile)
        return DatasetInput(dataset, {tag.key: tag.value for tag in self.tags})


class ModelInput(Message):
    model_id: Required


class LogInputs(OfRun):
    datasets: tuple[DatasetInputBody, ...] = ()
    models: tuple[ModelInput, ...] = ()


class SearchDatasets(Message):
    experiment_ids: tuple[str, ...] = ()


@router.post("/runs/log-inputs")
def log_inputs(body: LogInputs, tracking: TrackingOf) -> Response:
    tracking.inputs.log(
        body.run_id, [dataset.logged() for dataset in body.datasets], [model.model_id for model in body.models]
    )
    return answer()


@stock_paths.post("/api/2.0mlflow/experiments/search-datasets")
@stock_paths.post("/ajax-api/2.0mlflow/experiments/search-datasets")
@router.post("/experiments/search-datasets")
def search_datasets(body: SearchDatasets, tracking: TrackingOf, caller: CallerOf) -> Response:
    found = dataset_summaries(tracking, body.experiment_ids, caller.organization)
    return answer(dataset_summaries=[summary_message(summary) for summary in found])


def dataset_summaries(tracking: Tracking, experiment_ids: Sequence[str], organization: str) -> list[DatasetSummary]:
    """Raises a 400 where no experiment is named, or too many are."""
    asked = len(experiment_ids)
    if not asked:
        raise invalid("SearchDatasets request must specify at least one experiment_id.")
    if asked > MAX_EXPERIMENTS:
        raise invalid(
            f"SearchDatasets request cannot specify more than {MAX_EXPERIMENTS} experiment_ids. "
            f"Received {asked} experiment_ids."
        )
    return tracking.inputs.summaries([experiment_number(text) for text in experiment_ids], organization)


def summary_message(summary: DatasetSummary) -> dict[str, Any]:
    message = {"experiment_id": str(summary.experiment_id), "name": summary.name, "digest": summary.digest}
    return message if summary.context is None else {**message, "context": summary.context}
