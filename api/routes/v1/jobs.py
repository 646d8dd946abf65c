"""/v1/jobs: submit, list, cancel, resume and delete jobs, and stream their logs."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Query, Response
from fastapi.responses import StreamingResponse
from pydantic import Discriminator, Tag
from starlette.concurrency import run_in_threadpool

from api.auth.permissions import Permission
from api.dependencies import CallerDep, ComputeDep, DatabaseDep, FromOwnUserDep, SettingsDep, StoreDep
from api.errors import COMMAND_BODY, RECIPE_BODY
from api.idempotency import JobIdFromKey
from api.json_bodies import Deleted, TypedResponse, json_response
from api.routing import AlsoAnswers, Router
from api.schemas.v1.jobs import Job, JobWithLogs, job_json, job_with_logs_json
from api.schemas.v1.jobs import Jobs as JobsPage
from recipes.contracts.command_job import CommandJob
from recipes.storage.artifact_store import Store
from resources.compute.base import Compute, JobKey
from resources.jobs.command import stored_config, submit_command
from resources.jobs.resume import Wish, resume_job
from resources.jobs.submission import NewJob, Submitter, allow_command, check_command, check_training, queue_training
from resources.metadata.cluster_jobs import ClusterJobs
from resources.metadata.database import Database
from resources.metadata.job_record import UNSUBMITTED, unsubmitted_job
from resources.metadata.jobs import COMMAND, ENDED_STATUSES, MAX_PAGE, TRAINING, Jobs
from resources.settings.settings import Settings

# The log of a job's program, read from the compute backend: its end, or all of it, followed while it grows.

POLL_SECONDS = 0.5
QUIET_SECONDS = 15.0
"""Maximum silence of a followed log: proxies and clients close an idle connection after half a minute."""
MAX_READ_BYTES = 1 << 20
"""How much of a log is read at a time."""
MAX_TAIL_BYTES, MAX_TAIL_LINES = 64 << 10, 100
"""How much of its log is shown with a job."""


async def stream_log(database: Database, compute: Compute, job: JobKey, follow: bool) -> AsyncIterator[str]:
    """Stream the log as server-sent events.

    It waits without a thread: forty followers of silent jobs exhausted the thread pool.
    """
    offset, sent_at = 0, time.monotonic()
    while True:
        status = (await run_in_threadpool(Jobs(database).read, job.id)).status
        is_last = status in ENDED_STATUSES or not follow
        while lines := await run_in_threadpool(read_new_lines, compute, job, offset, is_last):
            offset, sent_at = offset + len(lines), time.monotonic()
            yield "".join(f"data: {line.decode(errors='replace')}\n\n" for line in lines.splitlines())
        if is_last:
            yield f"event: end\ndata: {status}\n\n"
            return
        if time.monotonic() - sent_at >= QUIET_SECONDS:
            sent_at = time.monotonic()
            yield f": {status}\n\n"
        await asyncio.sleep(POLL_SECONDS)


def read_last_lines(compute: Compute, job: JobKey) -> list[str]:
    """Return the last lines of a log; the first of them may be cut."""
    start = max(0, compute.log_size(job) - MAX_TAIL_BYTES)
    tail = compute.read_log(job, start, MAX_TAIL_BYTES)
    return tail.decode(errors="replace").splitlines()[-MAX_TAIL_LINES:]


def read_new_lines(compute: Compute, job: JobKey, offset: int, is_last: bool) -> bytes:
    """Return the next complete lines of a log; a line over `MAX_READ_BYTES` comes in parts.

    Each redraw of a progress bar counts as a line. The last read includes an unfinished line.
    """
    data = compute.read_log(job, offset, MAX_READ_BYTES)
    end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1  # after a final "\r", the "\n" of the same line may follow
    return data[:end] or (data if is_last or len(data) == MAX_READ_BYTES else b"")


# /v1/jobs: submit, inspect, follow, cancel, resume and delete jobs. The asset graph executes them.

router = Router("/v1/jobs", tag="v1", strict=False)


def submission_kind(body: Any) -> str:
    return COMMAND_BODY if isinstance(body, CommandJob) or (isinstance(body, dict) and "command" in body) else RECIPE_BODY


Submission = Annotated[
    Annotated[NewJob, Tag(RECIPE_BODY)] | Annotated[CommandJob, Tag(COMMAND_BODY)], Discriminator(submission_kind)
]
"""A job is submitted with a recipe or with a command."""


@router.post(
    "",
    Permission.JOBS_SUBMIT,
    creates_model=True,
    status_code=201,
    also=AlsoAnswers(200, "Checked with dry_run, and not queued", Job),
)
def submit(
    body: Submission,
    database: DatabaseDep,
    store: StoreDep,
    settings: SettingsDep,
    caller: CallerDep,
    from_own_user: FromOwnUserDep,
    new_job_id: JobIdFromKey,
    dry_run: bool = False,
) -> TypedResponse[Job]:
    """Queue a job, with its dataset pinned to the current version.

    A job that can never fit the hardware or its organization's quota is refused. A `command` runs unchanged. A
    repeated Idempotency-Key returns the existing job, and ignores the body. With `dry_run`, the job is checked in the same
    way and returned with 200, but not queued.
    """
    submitter = Submitter(caller.user_id, caller.organization, from_own_user)
    if dry_run:
        return json_response(checked_job_json(body, database, store, settings, submitter))
    if known := Jobs(database).find_by_id(new_job_id):
        return json_response(job_json(known), 201)
    if isinstance(body, CommandJob):
        body = check_command(body, settings, submitter)
        job = submit_command(database, store, body, caller.user_id, caller.organization, new_job_id)
    else:
        job = queue_training(body, database, store, settings, submitter, new_job_id)
    return json_response(job_json(job), 201)


def checked_job_json(
    body: NewJob | CommandJob, database: Database, store: Store, settings: Settings, submitter: Submitter
) -> Job:
    """Return the job that would be queued, with id 0, or refuse it."""
    if isinstance(body, CommandJob):
        kind, config = COMMAND, stored_config(check_command(body, settings, submitter), UNSUBMITTED)
    else:
        kind, config = TRAINING, dict(check_training(body, database, store, settings, submitter))
    job = unsubmitted_job(body.name, kind, config, submitter.user_id, submitter.organization)
    return job_json(job)


@router.get("", Permission.JOBS_READ)
def list_jobs(
    database: DatabaseDep,
    caller: CallerDep,
    status: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    page_token: str | None = None,
) -> TypedResponse[JobsPage]:
    """List the jobs of the caller's organization, newest first."""
    found, token = Jobs(database).page(caller.organization, status, limit=limit, page_token=page_token)
    page: JobsPage = {"jobs": [job_json(job) for job in found]}
    if token:
        page["next_page_token"] = token
    return json_response(page)


@router.get("/{job_id}", Permission.JOBS_READ)
def get(job_id: str, database: DatabaseDep, compute: ComputeDep) -> TypedResponse[JobWithLogs]:
    """Return a job with the last lines of its program's log."""
    job = Jobs(database).read(job_id)
    states = ClusterJobs(database).list_programs(job_id)
    return json_response(job_with_logs_json(job, read_last_lines(compute, job), states))


@router.post("/{job_id}/cancel", Permission.JOBS_CANCEL)
def cancel(job_id: str, database: DatabaseDep) -> TypedResponse[Job]:
    return json_response(job_json(Jobs(database).cancel(job_id)))


@router.post("/{job_id}/resume", Permission.JOBS_CANCEL)
def resume(
    job_id: str,
    database: DatabaseDep,
    store: StoreDep,
    settings: SettingsDep,
    caller: CallerDep,
    from_own_user: FromOwnUserDep,
    wish: Wish | None = None,
) -> TypedResponse[Job]:
    """Resume a failed or cancelled job from a checkpoint, on the GPUs that are available."""
    job = Jobs(database).read(job_id)
    if job.type == COMMAND:
        allow_command(settings, from_own_user)
    quota = settings.scheduler.quotas.get(job.organization)
    return json_response(job_json(resume_job(database, store, job_id, wish or Wish(), caller.user_id, quota)))


@router.delete("/{job_id}", Permission.JOBS_DELETE)
def delete(job_id: str, database: DatabaseDep) -> TypedResponse[Deleted]:
    """Remove an ended job from the list; its results and their lineage are kept."""
    Jobs(database).delete(job_id)
    return json_response({"deleted": job_id})


@router.get("/{job_id}/logs", Permission.JOBS_READ, produces="text/event-stream")
def logs(job_id: str, database: DatabaseDep, compute: ComputeDep, follow: bool = True) -> Response:
    """Stream the log of the job's program as server-sent events, one per line.

    `end` with the job's status closes the stream. While the log is silent, comments keep the connection open.
    """
    job = Jobs(database).read(job_id)
    return StreamingResponse(stream_log(database, compute, job, follow), media_type="text/event-stream")
