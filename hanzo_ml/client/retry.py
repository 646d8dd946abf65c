"""When a client's call is retried: backoff, refusals, and calls while the server is away."""

from collections.abc import Callable
from typing import TypeVar

FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 10.0
MAX_ATTEMPTS = 13
"""Of a call that may be sent twice: with the pauses between them, a server that is away for a minute is waited for."""
REFUSAL_CODES = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")

T = TypeVar("T")


def retry_delay(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 20))


def is_refusal(status: int, error_code: str) -> bool:
    """Whether sending the same again cannot help. Anything else (a proxy, an expired token, a restart) may pass."""
    return status in (400, 409, 413, 422) or (status == 404 and error_code in REFUSAL_CODES)


def retry_unavailable(call: Callable[[], T]) -> T:
    """Retry an idempotent call while the server does not answer, for about a minute."""
    # Not as `hanzo_ml` is imported: the transport brings httpx, and imports this module itself.
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

    from hanzo_ml.client.transport import Unavailable

    retrying = Retrying(
        retry=retry_if_exception_type(Unavailable),
        wait=lambda state: retry_delay(state.attempt_number),
        stop=stop_after_attempt(MAX_ATTEMPTS),
        reraise=True,
    )
    return retrying(call)
