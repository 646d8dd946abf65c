"""An upload that failed is tried again, after pauses in which a store or a network may find itself again."""

import time
from collections.abc import Callable

from recipes.runner import say

RETRY_SECONDS = (1.0, 4.0)
"""Pauses before an upload that failed is tried again; after the last it has failed for good."""


def tried_again(step: int, attempt: Callable[[], None]) -> None:
    """Upload the checkpoint of `step`. Raises what the last attempt raised."""
    for pause in (*RETRY_SECONDS, None):
        try:
            attempt()
            return
        except Exception as error:
            then = "given up" if pause is None else f"again in {pause:.0f} s"
            say(f"upload of checkpoint {step} failed, {then}: {type(error).__name__}: {' '.join(str(error).split())}")
            if pause is None:
                raise
        time.sleep(pause)
