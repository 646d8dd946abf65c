"""Idempotency keys: repeating a call with the same `Idempotency-Key` header creates nothing new.

The header follows IETF draft-ietf-httpapi-idempotency-key-header.

`hanzo_ml` sends one with `runs/create`, and each `POST` of `/v1` that starts work, such as a job or a sweep, accepts one:
started twice, it would train twice. Resuming and cancelling a job need no key: a repeated call is refused.

MLflow's protocol has no keys, and two equal requests may be intended: processes of a sweep create runs within one
millisecond, and registering a run's files twice creates two versions. So when a response is lost and MLflow's own client
retries, it creates a second run or version, as on MLflow's server. A registered model exists by then and gives
RESOURCE_ALREADY_EXISTS, which `mlflow.register_model` handles. Logging metrics, params and tags is idempotent.
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
        description="identifies a repeated call: use a new random value for each call",
    ),
]


def run_id_from_key(key: str, caller: Caller) -> str:
    """Return the id of the run that a caller creates with a key.

    Ids of different callers never collide, and no caller can choose one.
    """
    return hashlib.sha256(repr((caller.organization, caller.user_id, key)).encode()).hexdigest()[:32]


def sweep_id_from_key(key: str, caller: Caller) -> str:
    """Return the id of a sweep; its key may equal that of a run."""
    return run_id_from_key(f"sweep {key}", caller)


async def job_id_from_key(request: Request, caller: CallerDep, idempotency_key: IdempotencyKey = None) -> str | None:
    """Return the id of a job, None without a key.

    The same key used on another path gives another id.
    """
    return run_id_from_key(f"{request.url.path} {idempotency_key}", caller) if idempotency_key else None


JobIdFromKey = Annotated[str | None, Depends(job_id_from_key)]
"""Id for the job that the call starts; None for a random one."""
