"""Decide who may open Dagster's UI, which shows the data of all organizations.

With a single organization, its roles decide (`policy`). With several, only administrators of the organization that runs the
installation may open it (`dagster.admin_organization`). There are several as soon as the metadata database has data of
others, or `scheduler.namespace_per_organization` is set.
"""

import time

from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool

from api.auth.permissions import LOCAL, Caller
from api.dagster_ui.policy import UI_USER
from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.tables import dataset_versions, experiments, jobs, registered_models
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.settings.settings import Settings

CACHE_SECONDS = 5.0
MAX_CACHED = 1000
OWNED_TABLES = (experiments, jobs, dataset_versions, registered_models)


class DagsterAccess:
    """Checks callers of Dagster's UI."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._admin_organization = settings.dagster.admin_organization
        self._is_made_for_several = settings.scheduler.namespace_per_organization

        self._database = database
        self._cached: dict[str, tuple[bool, float]] = {}

    async def check(self, caller: Caller) -> None:
        """Raise a 403 for a caller who may not open Dagster's UI."""
        if caller is LOCAL or (caller.is_admin and caller.organization == self._admin_organization):
            return
        if caller.job is not None:
            raise HanzoError(
                ErrorCode.PERMISSION_DENIED, "A job's token is valid for its own run only, not for Dagster's UI"
            )
        if self._is_made_for_several or await self._shares_installation(caller.organization):
            message = (
                "Dagster's UI shows the data of all organizations: with several, it is open to the role ml-admin of "
                f"{self._admin_organization} only (setting dagster.admin_organization)"
            )
            raise HanzoError(ErrorCode.PERMISSION_DENIED, message)

    async def _shares_installation(self, organization: str) -> bool:
        known = self._cached.get(organization)
        if known is not None and time.monotonic() - known[1] < CACHE_SECONDS:
            return known[0]
        found = await run_in_threadpool(self._look_up, organization)
        if len(self._cached) >= MAX_CACHED:
            self._cached.clear()
        self._cached[organization] = (found, time.monotonic())
        return found

    def _look_up(self, organization: str) -> bool:
        with self._database.read() as connection:
            return has_other_organizations(connection, organization)


def has_other_organizations(connection: Connection, organization: str) -> bool:
    """Return whether any data belongs to users of another organization.

    What is created in Dagster's UI belongs to the organization `default`, which counts only for jobs that users submitted.
    """
    own = (organization, DEFAULT_ORGANIZATION)
    others = (select(table.c.organization).where(table.c.organization.not_in(own)).limit(1) for table in OWNED_TABLES)
    if any(connection.execute(query).first() is not None for query in others):
        return True
    if organization == DEFAULT_ORGANIZATION:
        return False
    people = select(jobs.c.id).where(jobs.c.organization == DEFAULT_ORGANIZATION, jobs.c.user_id != UI_USER).limit(1)
    return connection.execute(people).first() is not None
