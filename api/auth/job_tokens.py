"""Authenticate a job by its token, and restrict it to its own objects.

These are its run, what the run created, and its inputs. Routes declare whether they accept jobs (`allows_jobs`).
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool

from api.auth.ownership import PROXY_LISTING_ROUTE, missing_object, references
from api.auth.permissions import JOB, Caller
from resources.errors import ErrorCode, HanzoError
from resources.jobs.job_tokens import TOKEN_PREFIX, JobGrant, find_grant, hash_token
from resources.metadata.database import Database
from resources.metadata.field_rules import PARENT_TAG
from resources.metadata.ownership import ObjectKind, Reference, stored_id
from resources.metadata.tables import dataset_versions, logged_models, run_tags

CACHE_SECONDS = 5.0
"""How long a lookup is cached: a training loop sends many calls, and a revoked token ends within this time."""
MAX_CACHED = 2048
MAX_DEPTH = 8
"""Of nested runs."""
CREATE_RUN_PATH = "/mlflow/runs/create"


@dataclass(frozen=True)
class CachedCaller:
    caller: Caller
    at: float


class JobTokens:
    """Finds the job of a token."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cached: dict[str, CachedCaller] = {}

    async def caller(self, token: str) -> Caller:
        """Return the caller; raise a 401 if the token is unknown, expired or revoked."""
        known = self._cached.get(hash_token(token))
        if known is not None and time.monotonic() - known.at < CACHE_SECONDS:
            return known.caller
        grant = await run_in_threadpool(self._look_up, token)
        if grant is None:
            self._cached.pop(hash_token(token), None)
            raise HanzoError(
                ErrorCode.UNAUTHENTICATED, "The token is refused: it belongs to a job that has ended or was restarted"
            )
        caller = Caller(user_id=grant.user_id, organization=grant.organization, roles=frozenset({JOB}), job=grant)
        if len(self._cached) >= MAX_CACHED:
            self._cached.clear()
        self._cached[hash_token(token)] = CachedCaller(caller, time.monotonic())
        return caller

    def _look_up(self, token: str) -> JobGrant | None:
        with self._database.read() as connection:
            return find_grant(connection, token)


def job_token(authorization: str | None) -> str | None:
    """Return the token of a header, if it is a job's."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and token.startswith(TOKEN_PREFIX) else None


def acted_on_references(
    route: str, path: Mapping[str, str], query: Mapping[str, Sequence[str]], named: frozenset[Reference]
) -> frozenset[Reference]:
    """Return what a request acts on; for the artifact proxy, objects in its path."""
    if "artifact_path" in path:
        return references(route, {"artifact_path": path["artifact_path"]}, {})
    return references(route, {}, {"path": query.get("path", ())}) if PROXY_LISTING_ROUTE.search(route) else named


def job_references(route: str, acted_on: Iterable[Reference], body: Any) -> frozenset[Reference]:
    """Return what a job's request names; for a run to create, its parent run."""
    named = set(acted_on)
    if route.endswith(CREATE_RUN_PATH):
        named = {reference for reference in named if reference.kind is not ObjectKind.RUN}
        tags = body.get("tags") if isinstance(body, dict) else None
        for tag in tags if isinstance(tags, list) else ():
            if isinstance(tag, dict) and tag.get("key") == PARENT_TAG:
                named.add(Reference(ObjectKind.RUN, str(tag.get("value"))))
    return frozenset(named)


def check_job_scope(database: Database, grant: JobGrant, named: frozenset[Reference], *, writes: bool, lists: bool) -> None:
    """Check that a job's request names only its own objects.

    Raises:
        HanzoError: 404 for other objects, as for missing ones; 403 where a write names neither a run nor a logged model, or
            a read of objects (`lists`) names none.
    """
    own_run = Reference(ObjectKind.RUN, grant.run_id)
    if writes and not any(reference.kind in (ObjectKind.RUN, ObjectKind.LOGGED_MODEL) for reference in named):
        message = "A job's token writes to its own run only: name that run, or give it as mlflow.parentRunId of a new run"
        raise HanzoError(ErrorCode.PERMISSION_DENIED, message)
    if lists and not named:
        raise HanzoError(ErrorCode.PERMISSION_DENIED, "A job's token reads the job's own objects only: name one of them")
    others = sorted(named - {own_run})
    if not others:
        return
    with database.read() as connection:
        for reference in others:
            if not belongs_to_job(connection, grant, reference):
                raise missing_object(reference)


def belongs_to_job(connection: Connection, grant: JobGrant, reference: Reference) -> bool:
    if stored_id(reference) is None:
        return False
    match reference.kind:
        case ObjectKind.RUN:
            return is_descendant(connection, reference.id, grant.run_id)
        case ObjectKind.EXPERIMENT:
            return reference.id == str(grant.experiment_id)
        case ObjectKind.LOGGED_MODEL:
            query = select(logged_models.c.source_run_id).where(logged_models.c.id == reference.id)
            source = connection.execute(query).scalar()
            return source is not None and is_descendant(connection, source, grant.run_id)
        case ObjectKind.DATASET:
            row = connection.execute(select(dataset_versions).where(dataset_versions.c.id == reference.id)).first()
            if row is None or row.organization != grant.organization:
                return False
            return grant.dataset in (row.name, f"{row.name}@{row.version}")
        case ObjectKind.REGISTERED_MODEL:
            return reference.id in grant.models
        case ObjectKind.JOB:
            return reference.id == grant.job_id
        case _:
            return False


def is_descendant(connection: Connection, run_id: str, ancestor: str) -> bool:
    """Return whether a run is `ancestor` or a descendant of it."""
    for _ in range(MAX_DEPTH):
        if run_id == ancestor:
            return True
        parent = select(run_tags.c.value).where(run_tags.c.run_id == run_id, run_tags.c.key == PARENT_TAG)
        run_id = connection.execute(parent).scalar() or ""
        if not run_id:
            return False
    return False
