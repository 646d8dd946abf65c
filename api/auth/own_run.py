"""For endpoints that `api.auth.table` marks as checking their own organization and whose JSON body names it all."""

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from api.auth.object_references import references
from api.auth.ownership import check_own
from api.auth.permissions import LOCAL
from api.dependencies import CallerOf, DatabaseOf
from api.middleware.request_body import parsed


async def own_run(request: Request, database: DatabaseOf, caller: CallerOf) -> None:
    """A dependency: what the body names is the caller's organization's, or the call ends with a 404."""
    if caller is LOCAL:
        return
    body = parsed(await request.body(), request.scope["path"])
    request.state.run_id = body.get("run_id") or body.get("run_uuid") if isinstance(body, dict) else None
    named = references(f"{request.method} {request.url.path}", {}, {}, body)
    await run_in_threadpool(check_own, database, caller, *named)
