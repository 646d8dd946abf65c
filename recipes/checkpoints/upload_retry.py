"""Retried uploads of checkpoints: a short outage of the store or the network costs no checkpoint."""

from collections.abc import Callable

from tenacity import RetryCallState, Retrying

from recipes.runner import log_line
from recipes.storage.retry import after_pauses

PAUSES_SECONDS = (1.0, 4.0)
"""Pauses before the second and the third attempt; after that the upload has failed."""


def retry_upload(step: int, upload: Callable[[], None]) -> None:
    """Upload the checkpoint of `step`. Raises the error of the last attempt."""

    def report(error: BaseException | None, then: str) -> None:
        log_line(f"upload of checkpoint {step} failed, {then}: {type(error).__name__}: {' '.join(str(error).split())}")

    def report_pause(state: RetryCallState) -> None:
        report(state.outcome.exception() if state.outcome else None, f"again in {state.upcoming_sleep:.0f} s")

    try:
        Retrying(before_sleep=report_pause, **after_pauses(*PAUSES_SECONDS))(upload)
    except Exception as error:
        report(error, "given up")
        raise
