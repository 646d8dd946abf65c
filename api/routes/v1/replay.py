"""/v1/runs/{run_id}/replay (rows Y11, Y12): a finished run once more, and whether the same came out."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from api.dependencies import CallerOf, DatabaseOf, SettingsOf, StoreOf
from api.idempotency import JobOfKey
from api.routes.v1.jobs import as_json
from api.strict_json import StrictRoute
from resources.quotas import gpus_of, refuse_what_never_fits
from resources.replay.finished_run import read_finished
from resources.replay.submit import submit_replay
from resources.replay.verdict import read_verdict
from resources.services import SOURCE

router = APIRouter(prefix="/v1/runs", tags=["v1"], route_class=StrictRoute)


@router.post("/{run_id}/replay", status_code=201)
def replay(
    run_id: str, database: DatabaseOf, store: StoreOf, settings: SettingsOf, caller: CallerOf, job_of_key: JobOfKey
) -> Response:
    """Queue the run's replay; `environment` is what differs from the first run's before it starts. Sent again with the same
    Idempotency-Key it answers with the job that was queued.
    """
    first = read_finished(database, store, run_id)
    recipe, quota = first.record.recipe, settings.scheduler.quotas.get(first.job.organization)
    refuse_what_never_fits(quota, gpus_of(recipe.hardware, recipe.distributed))
    made = submit_replay(database, store, first, SOURCE, caller.user_id, job_of_key)
    environment = [difference.model_dump() for difference in made.environment]
    return JSONResponse({"job": as_json(made.job), "environment": environment}, 201)


@router.get("/{run_id}/replay")
def verdict(run_id: str, database: DatabaseOf, store: StoreOf) -> Response:
    """Of a completed replay: every loss and the final weights, held against the first run's."""
    return JSONResponse(read_verdict(database, store, run_id).model_dump(mode="json"))
