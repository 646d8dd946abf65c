"""/v1/jobs (rows G1, G6, S1-S4): submit, look, follow, cancel, resume, delete. What a job does is the asset
graph's business.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Discriminator, JsonValue, Tag, field_validator, model_validator
from starlette.concurrency import run_in_threadpool

from api.auth.permissions import Caller
from api.dependencies import CallerOf, DatabaseOf, FromOwnUser, SettingsOf, StoreOf
from api.errors import COMMAND_BODY, RECIPE_BODY
from recipes.command.job import CommandJob
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration, Schedule
from recipes.store import Store
from resources.command_jobs import submit_command
from resources.detached import LOG
from resources.errors import ErrorCode, HanzoError, invalid
from resources.estimate.admission import admit
from resources.estimate.past_runs import params_of_newest
from resources.estimate.shapes import shape_of_base
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.jobs import COMMAND, ENDED, MAX_PAGE, WORK_FOLDERS, JobRecord, Jobs
from resources.metadata.registry.model_version_rules import checked_model_name
from resources.metadata.told_config import MASK, told_config
from resources.quotas import gpus_of, refuse_what_never_fits, under_quota
from resources.resume import Wish, resume_job
from resources.settings import Settings

router = APIRouter(prefix="/v1/jobs", tags=["v1"])

POLL_SECONDS = 0.5
QUIET_SECONDS = 15.0
"""How long a log that is followed may send nothing: proxies and clients give up on a connection after half a minute."""
LOG_BYTES = 1 << 20
"""Of a log that are read at a time."""
LAST_BYTES, LAST_LINES = 64 << 10, 100
"""Of a log that a job is told with, at most."""
SANDBOX = "sandbox"
"""The standing definition for jobs that bring their own configuration."""
DEFAULT_RECIPE = "smollm2-135m-lora"
"""Stands for the recipe of a model definition, which only the asset graph knows: all recipes have the same keys."""


class NewJob(BaseModel):
    """A training job of a model definition, whose values hold where none are given; or of the sandbox, with a dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    type: Literal["training"] = "training"
    model: str = SANDBOX
    dataset: str | None = None
    recipe: str | None = None
    parameters: dict[str, JsonValue] = {}
    schedule: Schedule | None = None

    @model_validator(mode="before")
    @classmethod
    def leaves_the_recipe_s_keys_to_the_parameters(cls, value: Any) -> Any:
        """A job with a command has its `distributed` and `resources` beside its name: so people write them here too."""
        keys = value if isinstance(value, dict) else {}
        if misplaced := next((key for key in keys if key in Recipe.model_fields and key not in cls.model_fields), None):
            raise ValueError(f"'{misplaced}' is a key of the recipe: put it below `parameters:`")
        return value

    @field_validator("type", mode="before")
    @classmethod
    def only_training(cls, value: Any) -> Any:
        if value in ("eval", "conversion", "preprocessing"):
            raise ValueError("such a job needs a `command`: without one, the asset graph evaluates and converts itself")
        return value


def kind_of(body: Any) -> str:
    return COMMAND_BODY if isinstance(body, CommandJob) or (isinstance(body, dict) and "command" in body) else RECIPE_BODY


Submission = Annotated[
    Annotated[NewJob, Tag(RECIPE_BODY)] | Annotated[CommandJob, Tag(COMMAND_BODY)], Discriminator(kind_of)
]
"""A job is asked for in one of two ways: by a recipe, or by a command of the user's own."""


@router.post("", status_code=201)
def submit(
    body: Submission,
    database: DatabaseOf,
    store: StoreOf,
    settings: SettingsOf,
    caller: CallerOf,
    from_own_user: FromOwnUser,
) -> Response:
    """Queue a job. Its dataset, where one is named, is pinned to the version of now. One that cannot fit is refused, also
    one that its organization's quota has no room for, whatever else runs.

    One with a `command` runs it as it is.
    """
    if isinstance(body, CommandJob):
        quota = settings.scheduler.quotas.get(caller.organization)
        allow_command(settings, from_own_user)
        refuse_masks(body.env)
        refuse_what_never_fits(quota, gpus_of(body.resources, body.distributed))
        body = body.model_copy(update={"schedule": under_quota(body.schedule, quota)})
        return JSONResponse(as_json(submit_command(database, store, body, caller.user_id, caller.organization)), 201)
    return JSONResponse(as_json(queued(body, database, store, settings, caller)), 201)


def queued(body: NewJob, database: Database, store: Store, settings: Settings, caller: Caller) -> JobRecord:
    """The training job that is asked for. Raises HanzoError for what cannot be trained, or never fits."""
    quota = settings.scheduler.quotas.get(caller.organization)
    if body.model == SANDBOX and body.dataset is None:
        raise invalid("a job without a model definition needs a dataset: give `dataset`, or `model`")
    if body.model == SANDBOX:  # its version takes this name, hours from now
        checked_model_name(body.name)
    base = recipe_named(body.recipe)
    recipe = changed(base, body.parameters)
    allow_base_model(settings, recipe, base)
    allow_image(settings, recipe, base)
    if body.recipe or body.model == SANDBOX:
        admit(recipe, shape_of_base(recipe, store))
        refuse_what_never_fits(quota, gpus_of(recipe.hardware, recipe.distributed))
    elif usual := recipe_of_newest(body, database, caller):
        admit_usual(usual, body.model, store)
    if quota is not None:
        body = body.model_copy(update={"schedule": under_quota(body.schedule or Schedule(), quota)})
    config = body.model_dump(mode="json", exclude_none=True)
    if body.dataset is not None:
        config["dataset"] = Datasets(database).read(body.dataset, caller.organization).reference
    return Jobs(database).submit(name=body.name, config=config, user=caller.user_id, organization=caller.organization)


def recipe_of_newest(body: NewJob, database: Database, caller: Caller) -> Recipe | None:
    """The recipe of a model definition, which only the asset graph knows, as the newest run of that used it.

    None before the first run, or where that recipe is not there, or otherwise, by now.
    """
    used = params_of_newest(database, body.model, caller.organization)
    try:
        return Recipe.named(used["recipe"]).changed(body.parameters) if "recipe" in used else None
    except BadConfiguration:
        return None


def admit_usual(recipe: Recipe, model: str, store: Store) -> None:
    """Raises HanzoError where it cannot fit, with a way past: the definition may have another recipe since."""
    try:
        admit(recipe, shape_of_base(recipe, store))
    except HanzoError as refused:
        raise invalid(
            f"{refused.message} (the recipe of the newest run of model '{model}': give `recipe` if it has another by now)"
        ) from None


def allow_command(settings: Settings, from_own_user: bool) -> None:
    """A command has the rights of whoever started this server, so it is taken from that user alone.

    Raises:
        HanzoError: people sign in here, or somebody else sent it.
    """
    if settings.auth.verify_tokens:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "a job with a `command` would run with the rights of this server's own user, so none is taken where people "
            "sign in: submit one with a `recipe`, or start a stack of your own with `hanzo-ml up`",
        )
    if not from_own_user:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "a job with a `command` would run with the rights of this server's own user, and is taken from that user alone, "
            "on this machine and not through a proxy: start a stack of your own with `hanzo-ml up`",
        )


def refuse_masks(env: Mapping[str, str]) -> None:
    """A job file that was made of what this server answers. Raises HanzoError, naming the variable."""
    if masked := next((name for name, value in env.items() if value == MASK), None):
        raise invalid(f"env.{masked} is the mask that stands for a value in what this server tells of a job: give the value")


def allow_base_model(settings: Settings, recipe: Recipe, unchanged: Recipe) -> None:
    """A folder is read with the rights of this server, and may hold what another organization trained.

    Raises:
        HanzoError: people sign in here, and the job names a folder that its recipe does not.
    """
    own = unchanged.base_model
    if settings.auth.verify_tokens and recipe.base_model != own and recipe.base_model.is_folder:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "base_model.uri names a folder of this server, which none may where people sign in: name a package, or ask the "
            "operator for a recipe with this base model",
        )


def allow_image(settings: Settings, recipe: Recipe, unchanged: Recipe) -> None:
    """What a pod runs has the keys of the object store, which are everybody's.

    Raises:
        HanzoError: people sign in here, and the job names an image that its recipe does not.
    """
    if settings.auth.verify_tokens and recipe.image not in (None, unchanged.image):
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "image is one of your own, which none may name where people sign in: ask the operator for a recipe with it",
        )


def recipe_named(name: str | None) -> Recipe:
    """A recipe as it stands in its file. Raises HanzoError where there is none of that name."""
    try:
        return Recipe.named(name or DEFAULT_RECIPE)
    except BadConfiguration as problem:
        raise invalid(str(problem)) from None


def changed(recipe: Recipe, parameters: Mapping[str, JsonValue]) -> Recipe:
    """Refuse now what would fail when the job is started: parameters that do not fit the recipe. Raises HanzoError."""
    try:
        return recipe.changed(parameters)
    except BadConfiguration as problem:
        raise invalid(str(problem)) from None


@router.get("")
def list_jobs(
    database: DatabaseOf,
    caller: CallerOf,
    status: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    page_token: str | None = None,
) -> Response:
    """The caller's organization's jobs, newest first."""
    found, token = Jobs(database).page(caller.organization, status, limit=limit, page_token=page_token)
    following = {"next_page_token": token} if token else {}
    return JSONResponse({"jobs": [as_json(job) for job in found], **following})


@router.get("/{job_id}")
def get(job_id: str, database: DatabaseOf, settings: SettingsOf) -> Response:
    """A job with the end of its program's log (row G1); all of it is at `/logs`."""
    job = Jobs(database).read(job_id)
    return JSONResponse({**as_json(job), "logs": last_lines(log_of(job, settings))})


@router.post("/{job_id}/cancel")
def cancel(job_id: str, database: DatabaseOf) -> Response:
    return JSONResponse(as_json(Jobs(database).cancel(job_id)))


@router.post("/{job_id}/resume")
def resume(
    job_id: str,
    database: DatabaseOf,
    store: StoreOf,
    settings: SettingsOf,
    caller: CallerOf,
    from_own_user: FromOwnUser,
    wish: Wish | None = None,
) -> Response:
    """Go on with a job that failed or was cancelled: from a checkpoint of its run, on as many GPUs as are there."""
    job = Jobs(database).read(job_id)
    if job.type == COMMAND:
        allow_command(settings, from_own_user)
    quota = settings.scheduler.quotas.get(job.organization)
    return JSONResponse(as_json(resume_job(database, store, job_id, wish or Wish(), caller.user_id, quota)))


@router.delete("/{job_id}")
def delete(job_id: str, database: DatabaseOf) -> Response:
    """Take an ended job out of the list. What it made stays, with the job that it is traced back to."""
    Jobs(database).delete(job_id)
    return JSONResponse({"deleted": job_id})


@router.get("/{job_id}/logs")
def logs(job_id: str, database: DatabaseOf, settings: SettingsOf, follow: bool = True) -> Response:
    """The log of the job's program as server-sent events, one line each; `end` with the job's status closes it.

    A comment now and then while there is nothing to tell.
    """
    job = Jobs(database).read(job_id)
    return StreamingResponse(events(database, job.id, log_of(job, settings), follow), media_type="text/event-stream")


def log_of(job: JobRecord, settings: Settings) -> Path:
    return settings.home / "jobs" / job.id / WORK_FOLDERS[job.type] / LOG


async def events(database: Database, job_id: str, path: Path, follow: bool) -> AsyncIterator[str]:
    """Waits without a thread: forty who followed jobs that say nothing had all that the server has."""
    offset, told_at = 0, time.monotonic()
    while True:
        status = (await run_in_threadpool(Jobs(database).read, job_id)).status
        while lines := await run_in_threadpool(new_lines, path, offset):
            offset, told_at = offset + len(lines), time.monotonic()
            yield "".join(f"data: {line.decode(errors='replace')}\n\n" for line in lines.splitlines())
        if status in ENDED or not follow:
            yield f"event: end\ndata: {status}\n\n"
            return
        if time.monotonic() - told_at >= QUIET_SECONDS:
            told_at = time.monotonic()
            yield f": {status}\n\n"
        await asyncio.sleep(POLL_SECONDS)


def last_lines(path: Path) -> list[str]:
    """The newest lines of a log; of one that is longer than is read, a part."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        return file.read(LAST_BYTES).decode(errors="replace").splitlines()[-LAST_LINES:]


def new_lines(path: Path, offset: int) -> bytes:
    """The next whole lines of a log, some of them where there are many; a line that is longer than that comes in parts."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(LOG_BYTES)
    return data[: data.rfind(b"\n") + 1] or (data if len(data) == LOG_BYTES else b"")


def as_json(job: JobRecord) -> dict[str, Any]:
    """`type` as it was submitted; a job with a command is told by its configuration, in which variables have no values."""
    return {**vars(job), "type": job.config.get("type", job.type), "config": told_config(job.config)}
