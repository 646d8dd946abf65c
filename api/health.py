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

# MLflow's clients read this before they choose a protocol. Served below /api/3.0 too.

server_info_router = Router("/mlflow", tag="mlflow", strict=False)

MLFLOW_API_VERSION = "3.17.2"
"""The MLflow release whose REST API this server implements: clients enable features by it."""


@server_info_router.get("/server-info", Permission.SERVER_READ, allows_jobs=True)
def server_info(settings: SettingsDep) -> TypedResponse[responses.ServerInfoAnswer]:
    return mlflow_response(
        store_type="SqlStore",
        workspaces_enabled=False,
        trace_archival_enabled=False,
        # Downloads never: each would bypass this server, and not every client can reach the S3 server.
        multipart_uploads_enabled=bool(settings.storage.endpoint and settings.storage.public_endpoint),
        multipart_downloads_enabled=False,
        # The endpoint accepts such requests, as in MLflow; its response says whether it can sign for a file.
        presigned_upload_run_id_supported=True,
        presigned_upload_model_id_supported=True,
        features_enabled={"gateway": False},
    )


# Health checks: /alive, /ready and /health, which need no sign-in, and /version.


class Alive(TypedDict):
    alive: bool


class Ready(TypedDict):
    """`ready` if every part answers."""

    ready: bool
    database: bool
    storage: bool


log = logging.getLogger(__name__)

router = Router(tag="health", strict=False)

PROBE_TIMEOUT_SECONDS = 4.0
"""Below the 5 s for which Kubernetes waits (`deploy/`)."""
ABANDON_SECONDS = 60.0
"""When a pending check is abandoned: its connection may be dead while a new one would work."""


class Probe:
    """A health check that never runs twice at once: concurrent callers share its result.

    Args:
        ask: returns whether the part answers; `answers` raises its exceptions.
    """

    def __init__(self, ask: Callable[[], bool], wait: float = PROBE_TIMEOUT_SECONDS) -> None:
        self._ask = ask
        self._wait = wait
        self._pending: Future[bool] | None = None
        self._pending_since = 0.0

    async def answers(self) -> bool:
        """Return the result of the check, or False if it takes too long."""
        if self._pending is None or self._pending.done() or time.monotonic() > self._pending_since + ABANDON_SECONDS:
            self._pending, self._pending_since = Future(), time.monotonic()
            # A daemon thread: the process can end while a check hangs.
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
    """Report which parts answer, within a few seconds even if one hangs."""
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
    """Return MLflow's release for MLflow's clients; they send their token, so it requires sign-in."""
    return PlainTextResponse(MLFLOW_API_VERSION)


def make_probes(app: FastAPI, tracking: Tracking, database: Database, store: Store) -> dict[str, Probe]:
    """Make the checks of `/ready`. The application remembers whether it ever reached its database."""

    def ask_database() -> bool:
        answers = is_database_ready(tracking, database, is_new=not app.state.database_seen)
        app.state.database_seen |= answers
        return answers

    return {"database": Probe(ask_database), "storage": Probe(partial(is_storage_ready, store))}


def is_database_ready(tracking: Tracking, database: Database, *, is_new: bool) -> bool:
    """Check the database; create the tables of an empty one on first sight.

    A database that lost its tables later is reported, not recreated.
    """
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
