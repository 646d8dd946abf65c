"""/mlflow/runs/create-promptlab-run: save a prompt experiment as a run with params and a one-row table.

Unlike MLflow's, the run has no model that calls the gateway: there is none here.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool

from api.artifacts.verified_files import ExpectedChecksums
from api.auth.permissions import Caller, Permission
from api.dependencies import CallerDep, RunArtifactsDep, TrackingDep
from api.json_bodies import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import Message, Tag, experiment_number, mlflow_response
from api.schemas.mlflow.runs import run_message
from resources.errors import invalid
from resources.metadata.artifacts.locations import check_proxied
from resources.metadata.tracking.run_states import Run
from resources.metadata.tracking.tracking import Tracking

router = Router("/mlflow/runs", tag="mlflow")

TABLE = "eval_results_table.json"
TAGS = {
    "mlflow.loggedArtifacts": json.dumps([{"path": TABLE, "type": "table"}]),
    "mlflow.runSourceType": "PROMPT_ENGINEERING",
}
REQUIRED = ("experiment_id", "prompt_template", "prompt_parameters", "model_route", "model_input", "mlflow_version")
"""In the order in which MLflow checks them."""


class Parameter(Message):
    """A parameter of a prompt or model; numbers are stored as Python formats them."""

    key: str
    value: Any = None

    @property
    def pair(self) -> tuple[str, str]:
        return self.key, str(self.value)


class CreatePromptlabRun(Message):
    experiment_id: str = ""
    run_name: str = ""
    tags: tuple[Tag, ...] = ()
    prompt_template: str = ""
    prompt_parameters: tuple[Parameter, ...] = ()
    model_route: str = ""
    model_parameters: tuple[Parameter, ...] = ()
    model_input: str = ""
    model_output: str | None = None
    model_output_parameters: tuple[Parameter, ...] = ()
    mlflow_version: str = ""
    user_id: str = "unknown"
    start_time: int | None = None


@router.post("/create-promptlab-run", Permission.EXPERIMENTS_WRITE)
async def create(
    body: CreatePromptlabRun, tracking: TrackingDep, artifacts: RunArtifactsDep, caller: CallerDep
) -> TypedResponse[responses.RunAnswer]:
    for name in REQUIRED:
        if not getattr(body, name):
            raise invalid(f"CreatePromptlabRun request must specify {name}.")
    run = await run_in_threadpool(create_run, body, tracking, caller)
    ended = "failed"
    try:
        await artifacts.receive(run.id, TABLE, single_chunk(results_table(body)), ExpectedChecksums(), None)
        ended = "completed"
    finally:
        run = await run_in_threadpool(tracking.runs.set_status, run.id, ended)
    return mlflow_response(run=run_message(await run_in_threadpool(tracking.run_search.get, run)))


def create_run(body: CreatePromptlabRun, tracking: Tracking, caller: Caller) -> Run:
    """Create the run with everything but its file, or nothing."""
    params = [parameter.pair for parameter in body.model_parameters]
    params += [("model_route", body.model_route), ("prompt_template", body.prompt_template)]
    with tracking.write() as writer:
        run = tracking.runs.create(
            experiment_number(body.experiment_id),
            name=body.run_name or None,
            user_id=caller.user_or(body.user_id),
            tags={tag.key: tag.value for tag in body.tags} | TAGS,
            start_time=body.start_time,
            connection=writer,
        )
        check_proxied(run.artifact_uri)
        tracking.run_data.log_batch(run.id, params=params, connection=writer)
    return run


def results_table(body: CreatePromptlabRun) -> bytes:
    """Encode the table that the experiment page shows: prompt and answer in one row."""
    asked, more = ([each.pair for each in given] for given in (body.prompt_parameters, body.model_output_parameters))
    cells = [*asked, ("prompt", body.model_input), ("output", body.model_output), *more]
    return json.dumps({"columns": [name for name, _ in cells], "data": [[value for _, value in cells]]}).encode()


async def single_chunk(content: bytes) -> AsyncIterator[bytes]:
    yield content
