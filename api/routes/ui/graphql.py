"""MLflow's GraphQL queries for its web UI, answered with the REST API's messages. Read-only."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from api.artifacts.run_artifacts import RunArtifacts
from api.auth.ownership import require_ownership
from api.auth.permissions import Permission
from api.dependencies import CallerDep, DatabaseDep, RunArtifactsDep, TrackingDep
from api.errors import public_message
from api.json_bodies import Body
from api.routes.mlflow.inputs_and_outputs import dataset_summaries, summary_message
from api.routes.mlflow.metrics import MAX_POINTS_PER_RUN, point_message, step_interval
from api.routes.mlflow.metrics import MAX_RUNS as MAX_SAMPLED
from api.routing import Router
from api.schemas.mlflow.messages import VIEWS, experiment_message, experiment_number
from api.schemas.mlflow.registry import version_message
from api.schemas.mlflow.runs import run_message, translate_status_conditions
from resources.errors import invalid
from resources.metadata.artifacts.locations import check_proxied
from resources.metadata.filters.parser import parse_filter, parse_orders
from resources.metadata.ownership import ObjectKind, Reference
from resources.metadata.registry.search import VERSION_GRAMMAR, RegistrySearch
from resources.metadata.tracking.logged_runs import LoggedRun
from resources.metadata.tracking.run_search import RUN_GRAMMAR
from resources.metadata.tracking.tracking import Tracking

router = Router(include_in_schema=False)

MAX_PAGE = 1000
"""Upper limit of a page; the next page has more."""
MAX_VERSIONS = 100
"""Of one run, as its page lists them."""


class Query(Body):
    query: str
    variables: dict[str, Any] | None = None
    operationName: str | None = None


@router.get("/graphql", Permission.EXPERIMENTS_READ, checks_ownership=True)
@router.post("/graphql", Permission.EXPERIMENTS_READ, read_only=True, checks_ownership=True)
def graphql(
    body: Query,
    request: Request,
    tracking: TrackingDep,
    artifacts: RunArtifactsDep,
    database: DatabaseDep,
    caller: CallerDep,
) -> Response:
    # Importing GraphQL takes up to a tenth of the server's start time, which only users of the UI should pay.
    from api.routes.ui.graphql_execution import execute

    registry = RegistrySearch(database, caller.organization)
    questions = QueryRoot(tracking, artifacts, registry, caller.organization, partial(require_ownership, database, caller))
    say = partial(public_message, request)
    return JSONResponse(execute(questions, body.query, body.variables, body.operationName, say))


class QueryRoot:
    """Fields of the schema's Query: each takes `input` and returns MLflow's snake_case message."""

    def __init__(
        self,
        tracking: Tracking,
        artifacts: RunArtifacts,
        registry: RegistrySearch,
        organization: str,
        require_ownership: Callable[..., None],
    ) -> None:
        self._tracking = tracking
        self._artifacts = artifacts
        self._require_ownership = require_ownership
        self._registry = registry
        self._organization = organization

    def mlflow_get_run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        run = self._tracking.runs.get(given.get("runId") or given.get("runUuid") or "")
        self._require_ownership(Reference(ObjectKind.RUN, run.id))
        return {"run": self._run(self._tracking.run_search.get(run))}

    def mlflow_get_experiment(self, given: Mapping[str, Any]) -> dict[str, Any]:
        number = experiment_number(given.get("experimentId") or "")
        self._require_ownership(Reference(ObjectKind.EXPERIMENT, str(number)))
        return {"experiment": experiment_message(self._tracking.experiments.get(number))}

    def mlflow_search_runs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        page = self._tracking.run_search.search(
            [experiment_number(text) for text in given.get("experimentIds") or ()],
            conditions=translate_status_conditions(parse_filter(given.get("filter") or "", RUN_GRAMMAR)),
            orders=parse_orders(given.get("orderBy") or (), RUN_GRAMMAR),
            lifecycle_stages=VIEWS[given.get("runViewType") or "ACTIVE_ONLY"],
            limit=page_limit(given, MAX_PAGE),
            page_token=given.get("pageToken") or None,
            organization=self._organization,
        )
        return {"runs": [self._run(logged) for logged in page.runs], "next_page_token": page.next_page_token}

    def mlflow_get_metric_history_bulk_interval(self, given: Mapping[str, Any]) -> dict[str, Any]:
        steps = step_interval(given.get("startStep"), given.get("endStep"))
        limit = page_limit(given, MAX_POINTS_PER_RUN)
        run_ids = (given.get("runIds") or ())[:MAX_SAMPLED]
        self._require_ownership(*(Reference(ObjectKind.RUN, run_id) for run_id in run_ids))
        found = self._tracking.metric_sampling.sample(run_ids, given.get("metricKey") or "", limit, steps)
        return {"metrics": [point_message(point) for point in found]}

    def mlflow_list_artifacts(self, given: Mapping[str, Any]) -> dict[str, Any]:
        run = self._tracking.runs.get(given.get("runId") or given.get("runUuid") or "")
        self._require_ownership(Reference(ObjectKind.RUN, run.id))
        check_proxied(run.artifact_uri)
        found = self._artifacts.entries(run.id, given.get("path") or "")
        files = [{"path": entry.path, "is_dir": entry.is_dir, "file_size": entry.size or 0} for entry in found]
        return {"root_uri": run.artifact_uri, "files": files}

    def mlflow_search_model_versions(self, given: Mapping[str, Any]) -> dict[str, Any]:
        page = self._registry.versions(
            parse_filter(given.get("filter") or "", VERSION_GRAMMAR),
            parse_orders(given.get("orderBy") or (), VERSION_GRAMMAR),
            page_limit(given, MAX_PAGE),
            given.get("pageToken") or None,
        )
        found = [version_message(version) for version in page.versions]
        return {"model_versions": found, "next_page_token": page.next_page_token}

    def test(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Echo the input, as MLflow does for testing the endpoint."""
        return {"output": given.get("inputString")}

    test_mutation = test

    def mlflow_search_datasets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        found = dataset_summaries(self._tracking, given.get("experimentIds") or (), self._organization)
        return {"dataset_summaries": [{"context": "", **summary_message(summary)} for summary in found]}

    def _run(self, logged: LoggedRun) -> dict[str, Any]:
        experiment = self._tracking.experiments.get(logged.run.experiment_id)
        of_run = parse_filter(f"run_id = '{logged.run.id}'", VERSION_GRAMMAR)
        versions = self._registry.versions(of_run, (), MAX_VERSIONS, None).versions
        return {
            **msgspec.to_builtins(run_message(logged)),
            "experiment": experiment_message(experiment),
            "model_versions": [version_message(version) for version in versions],
        }


def page_limit(given: Mapping[str, Any], maximum: int) -> int:
    """Return `maxResults`, capped at `maximum`; refuse -1, which databases read as unlimited."""
    asked = given.get("maxResults")
    if asked is None:
        return maximum
    text = str(asked)
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise invalid(f"Invalid value {text!r:.60} for parameter 'max_results' supplied. It must be a positive integer.")
    return min(int(text), maximum)
