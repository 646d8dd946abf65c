"""Check that the objects a request names are of the caller's organization; others do not exist for the caller (row W5)."""

from collections.abc import Iterable

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from api.auth.object_references import references
from api.auth.permissions import LOCAL, Caller
from api.dependencies import CallerOf, DatabaseOf
from api.middleware.request_body import parse_body
from resources.errors import ErrorCode, HanzoError, not_found
from resources.metadata.database import Database
from resources.metadata.field_rules import printable
from resources.metadata.ownership import ObjectKind, Reference, find_owners

MISSING = {
    ObjectKind.EXPERIMENT: "No Experiment with id={} exists",
    ObjectKind.RUN: "Run with id={} not found",
    ObjectKind.LOGGED_MODEL: "Logged model with ID '{}' not found.",
    ObjectKind.REGISTERED_MODEL: "Registered Model with name={} not found",
    ObjectKind.DATASET: "no dataset version has the id '{}': see `hanzo-ml dataset list`",
    ObjectKind.ORGANIZATION: "There is nothing at that place in this server's store",
    ObjectKind.SWEEP: "there is no sweep '{}': see `hanzo-ml hpo list`",
    ObjectKind.JOB: "there is no job '{}': see `hanzo-ml job list`",
}


def check_ownership(
    database: Database, caller: Caller, named: Iterable[Reference], *, may_be_new: bool, only_own: bool
) -> None:
    """Look everything up in one transaction.

    Raises:
        HanzoError: 404, in the same words for what is another organization's and for what is not there at all; 403 where
            the caller may act on his own only.
    """
    wanted = sorted(named)
    with database.read() as connection:
        found = find_owners(connection, wanted, caller.organization)
    for reference in wanted:
        owner = found.get(reference)
        is_new_model = may_be_new and reference.kind is ObjectKind.REGISTERED_MODEL
        if owner is None and is_new_model:
            continue
        if owner is None or owner.organization != caller.organization:
            raise missing_object(reference)
        if only_own and reference.kind is ObjectKind.JOB and owner.user_id != caller.user_id:
            message = f"job '{printable(reference.id)}' is another user's: an ml-admin may do this"
            raise HanzoError(ErrorCode.PERMISSION_DENIED, message)


def require_ownership(database: Database, caller: Caller, *named: Reference) -> None:
    """`check_ownership` for endpoints that are declared with `checks_ownership`; nothing without sign-in."""
    if caller is not LOCAL:
        check_ownership(database, caller, named, may_be_new=False, only_own=False)


def missing_object(reference: Reference) -> HanzoError:
    return not_found(MISSING[reference.kind].format(printable(reference.id)))


async def require_own_run(request: Request, database: DatabaseOf, caller: CallerOf) -> None:
    """A dependency: what the body names is the caller's organization's, or the call ends with a 404."""
    if caller is LOCAL:
        return
    body = parse_body(await request.body(), request.scope["path"])
    request.state.run_id = body.get("run_id") or body.get("run_uuid") if isinstance(body, dict) else None
    named = references(f"{request.method} {request.url.path}", {}, {}, body)
    await run_in_threadpool(require_ownership, database, caller, *named)
