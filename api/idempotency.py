"""Idempotency keys: a call that is sent again with the same `Idempotency-Key` header makes nothing more.

The header is that of IETF draft-ietf-httpapi-idempotency-key-header.

`hanzo_ml` sends one with `runs/create`, and each `POST` of `/v1` takes one that starts work, as a job or a sweep: started
twice it trains twice. To resume or to cancel a job is known by the job: sent again it is refused.

MLflow's protocol has none, and two equal requests may well be meant: the processes of a sweep begin runs in one millisecond,
and to register a run's files twice makes two versions. So a retry of MLflow's own clients whose answer was lost is a call of
its own, as on MLflow's server: a second run, or a second version; of a registered model, which has been made already,
RESOURCE_ALREADY_EXISTS, with which `mlflow.register_model` goes on. Metrics, params and tags are known by what they are:
sent again they change nothing.
"""

import hashlib
from typing import Annotated

from fastapi import Depends, Header, Request

from api.auth.permissions import Caller
from api.dependencies import CallerDep

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=250,
        description="by which a call that is sent again is known: use another random one for each call",
    ),
]


def run_id_from_key(key: str, caller: Caller) -> str:
    """The id of the run that a caller makes with a key. Nobody else has it, and nobody can choose it."""
    return hashlib.sha256(repr((caller.organization, caller.user_id, key)).encode()).hexdigest()[:32]


def sweep_id_from_key(key: str, caller: Caller) -> str:
    """The same of a sweep, whose key may be that of a run too."""
    return run_id_from_key(f"sweep {key}", caller)


async def job_id_from_key(request: Request, caller: CallerDep, idempotency_key: IdempotencyKey = None) -> str | None:
    """The same of a job, whose key may be that of a call to another path too; None without one."""
    return run_id_from_key(f"{request.url.path} {idempotency_key}", caller) if idempotency_key else None


JobIdFromKey = Annotated[str | None, Depends(job_id_from_key)]
"""The id that a job has which a call starts; any where it is None."""
