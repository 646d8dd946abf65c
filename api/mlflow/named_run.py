"""The run that a query names: `run_id`, or `run_uuid` as old clients say. It is missed before any other parameter is."""

from typing import Annotated

from fastapi import Depends, Query

from api.errors import ALSO
from resources.errors import invalid


async def named_run(run_id: Annotated[str | None, Query()] = None, run_uuid: Annotated[str | None, Query()] = None) -> str:
    named = run_id or run_uuid
    if not named:
        raise invalid(f"Missing value for required parameter 'run_id'. {ALSO}")
    return named


NamedRun = Annotated[str, Depends(named_run)]
