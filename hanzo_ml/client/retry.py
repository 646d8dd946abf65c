"""Retry client calls: backoff, refusals, and an unavailable server."""

from collections.abc import Callable
from typing import TypeVar

FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 10.0
MAX_ATTEMPTS = 13
"""For an idempotent call: with the pauses between attempts, a server may be unavailable for a minute."""
REFUSAL_CODES = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")

T = TypeVar("T")


def retry_delay(failures: int) -> float:
    """Return the seconds to wait after this number of consecutive failures."""
    return min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 20))


def is_refusal(status: int, error_code: str) -> bool:
    """Return whether a repeated request cannot succeed.

    Other errors (a proxy, an expired token, a restart) may be temporary.
    """
    return status in (400, 409, 413, 422) or (status == 404 and error_code in REFUSAL_CODES)


def retry_unavailable(call: Callable[[], T]) -> T:
    """Retry an idempotent call while the server does not answer, for about a minute."""
    # Imported late: the transport imports httpx, and this module.
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

    from hanzo_ml.client.transport import Unavailable

    retrying = Retrying(
        retry=retry_if_exception_type(Unavailable),
        wait=lambda state: retry_delay(state.attempt_number),
        stop=stop_after_attempt(MAX_ATTEMPTS),
        reraise=True,
    )
    return retrying(call)
