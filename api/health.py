"""Health probes, heartbeats, addresses, and MLflow's server info."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from sqlalchemy.exc import SQLAlchemyError
from typing_extensions import TypedDict

from api.auth.permissions import Permission
from api.dependencies import SettingsDep
from api.json_bodies import TypedResponse, json_response
from api.routing import PUBLIC, AlsoAnswers, Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import mlflow_response
from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.metadata.migrate import Revision, create_if_missing
from resources.metadata.tracking.tracking import Tracking
from resources.object_store.health import find_store_problem

# What MLflow's clients ask about the server before they choose how to talk to it. Served below /api/3.0 too.

server_info_router = Router("/mlflow", tag="mlflow", strict=False)

MLFLOW_API_VERSION = "3.17.2"
"""The release whose REST API this is: clients compare it with the releases that brought a feature."""


@server_info_router.get("/server-info", Permission.SERVER_READ, allows_jobs=True)
def server_info(settings: SettingsDep) -> TypedResponse[responses.ServerInfoAnswer]:
    return mlflow_response(
        store_type="SqlStore",
        workspaces_enabled=False,
        trace_archival_enabled=False,
        # Downloads never: every one would go past this server, and only some clients reach the S3 server.
        multipart_uploads_enabled=bool(settings.storage.endpoint and settings.storage.public_endpoint),
        multipart_downloads_enabled=False,
        # That the endpoint takes such requests, as in MLflow; whether it can sign for a file, it says itself.
        presigned_upload_run_id_supported=True,
        presigned_upload_model_id_supported=True,
        features_enabled={"gateway": False},
    )


# Health checks: /alive, /ready and /health, which need no sign-in, and /version (rows V1, V7).


class Alive(TypedDict):
    alive: bool


class Ready(TypedDict):
    """`ready` where every part answers."""

    ready: bool
    database: bool
    storage: bool


log = logging.getLogger(__name__)

router = Router(tag="health", strict=False)

PROBE_TIMEOUT_SECONDS = 4.0
"""Kubernetes waits for 5 s, as `deploy/` has it."""
ABANDON_SECONDS = 60.0
"""After which a question is given up that nothing came of: what it hangs on may be gone, and its successor be well."""


class Probe:
    """One question, pending by one thread at a time: those who ask meanwhile wait for the same answer.

    Args:
        ask: whether it answers; what it raises, `answers` raises.
    """

    def __init__(self, ask: Callable[[], bool], wait: float = PROBE_TIMEOUT_SECONDS) -> None:
        self._ask = ask
        self._wait = wait
        self._pending: Future[bool] | None = None
        self._pending_since = 0.0

    async def answers(self) -> bool:
        """False also where it did not say so in time."""
        if self._pending is None or self._pending.done() or time.monotonic() > self._pending_since + ABANDON_SECONDS:
            self._pending, self._pending_since = Future(), time.monotonic()
            # A daemon: the end of the process waits for no answer.
            Thread(target=_run_check, args=(self._ask, self._pending), name="probe", daemon=True).start()
        pending = asyncio.wrap_future(self._pending)
        done, _ = await asyncio.wait([pending], timeout=self._wait)
        return pending in done and pending.result()


def _run_check(ask: Callable[[], bool], answer: "Future[bool]") -> None:
    try:
        answer.set_result(ask())
    except Exception as error:
        answer.set_exception(error)


@router.get("/alive", PUBLIC, head=True)
async def alive() -> TypedResponse[Alive]:
    return json_response({"alive": True})


@router.get("/ready", PUBLIC, head=True, also=AlsoAnswers(503, "which part does not answer", Ready))
async def ready(request: Request) -> TypedResponse[Ready]:
    """Answered in a few seconds, whatever hangs."""
    probes: dict[str, Probe] = request.app.state.probes
    answers = await asyncio.gather(*(probe.answers() for probe in probes.values()))
    parts = dict(zip(probes, answers, strict=True))
    return json_response(
        Ready(ready=all(answers), database=parts["database"], storage=parts["storage"]),
        status_code=200 if all(answers) else 503,
    )


@router.get("/health", PUBLIC, produces="text/plain", head=True)
async def health() -> PlainTextResponse:
    return PlainTextResponse("OK")


@router.get("/version", Permission.SERVER_READ, allows_jobs=True, produces="text/plain", head=True)
def version() -> PlainTextResponse:
    """MLflow's release, because MLflow's clients ask: with their token, so it is no exception (checklist Z21)."""
    return PlainTextResponse(MLFLOW_API_VERSION)


def make_probes(app: FastAPI, tracking: Tracking, database: Database, store: Store) -> dict[str, Probe]:
    """What `/ready` asks. The application remembers whether its database was ever there."""

    def ask_database() -> bool:
        answers = is_database_ready(tracking, database, is_new=not app.state.database_seen)
        app.state.database_seen |= answers
        return answers

    return {"database": Probe(ask_database), "storage": Probe(partial(is_storage_ready, store))}


def is_database_ready(tracking: Tracking, database: Database, *, is_new: bool) -> bool:
    """One that this server has not seen yet gets its tables, where it has none. One that lost them is not to look whole."""
    try:
        try:
            tracking.experiments.ensure_default()
        except SQLAlchemyError:
            if not is_new or create_if_missing(database) is not Revision.NONE:
                raise
            tracking.experiments.ensure_default()
    except (SQLAlchemyError, OSError) as error:
        log.warning("not ready: the database does not answer: %s", error)
        return False
    return True


def is_storage_ready(store: Store) -> bool:
    problem = find_store_problem(store)
    if problem:
        log.warning("not ready: the object store: %s", problem)
    return problem is None
