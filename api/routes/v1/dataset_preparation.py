"""Preparing a version (rows C1-C4): a job, which the asset graph runs; what it makes is a version of its own."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from api.dependencies import CallerOf, DatabaseOf
from api.idempotency import JobOfKey
from api.schemas.v1.datasets import find
from api.strict_json import StrictRoute
from recipes.parameters import PrepareParameters
from recipes.preparation.tokenizer_reference import recipe_named
from recipes.schema import BadConfiguration
from resources.derived_versions import refuse_unknown_columns, refuse_what_decides_nothing
from resources.errors import invalid
from resources.metadata.dataset_rules import checked_name
from resources.metadata.jobs import PREPARATION, Jobs

router = APIRouter(prefix="/v1/datasets", tags=["v1"], route_class=StrictRoute)


class Preparation(PrepareParameters):
    """The specification's sections, the name of the dataset that the version belongs to, and how much works on it."""

    name: str | None = Field(None, description="of the prepared dataset; that of its parent where none is given")
    workers: int = Field(1, ge=1, le=256, description="processes, of each pod")
    pods: int = Field(1, ge=1, le=256, description="on a cluster; on one machine it is one")


@router.post("/{dataset_id}/prepare", status_code=201)
def prepare(dataset_id: str, body: Preparation, database: DatabaseOf, caller: CallerOf, job_of_key: JobOfKey) -> Response:
    """Queue the preparation of a version; the answer is its job, as of `GET /v1/jobs/{id}`. Sent again with the same
    Idempotency-Key it answers with the job that was queued, whatever the body says.
    """
    if known := Jobs(database).known(job_of_key):
        return JSONResponse(vars(known), 201)
    parent = find(database, dataset_id)
    name = checked_name(body.name or parent.name)
    refuse_what_decides_nothing(body)
    refuse_unknown_columns(body, parent)
    refuse_unknown_recipe(body)
    config = {
        "name": name,
        "dataset": parent.reference,
        "parameters": body.model_dump(mode="json", exclude={"name", "workers", "pods"}),
        "workers": body.workers,
        "pods": body.pods,
    }
    job = Jobs(database).submit(
        name=f"prepare {parent.reference}",
        config=config,
        user=caller.user_id,
        organization=caller.organization,
        type=PREPARATION,
        id=job_of_key,
    )
    return JSONResponse(vars(job), 201)


def refuse_unknown_recipe(body: PrepareParameters) -> None:
    """Raises 400 for a tokenizer of a recipe that there is not. Of others only who fetches them knows whether they are."""
    try:
        if body.tokenize is not None:
            recipe_named(body.tokenize.tokenizer)
    except BadConfiguration as problem:
        raise invalid(f"tokenize.tokenizer: {problem}") from None
