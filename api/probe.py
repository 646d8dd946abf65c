"""Whether something that the server stands on answers, told in time also where it never will.

A host that swallows what is sent to it holds up whoever asks, for as long as its connections last, and with the calls that
wait for it all the threads that calls are answered in. So a question has a thread of its own, and who asked waits no longer
than he can.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

WAIT_SECONDS = 4.0
"""Kubernetes waits for 5 s, as `deploy/` has it."""
LOST_SECONDS = 60.0
"""After which a question is given up that nothing came of: what it hangs on may be gone, and its successor be well."""


class Probe:
    """One question, asked by one thread at a time: those who ask meanwhile wait for the same answer.

    Args:
        ask: whether it answers; what it raises, `answers` raises.
    """

    def __init__(self, ask: Callable[[], bool], wait: float = WAIT_SECONDS) -> None:
        self._ask = ask
        self._wait = wait
        self._asked: Future[bool] | None = None
        self._asked_at = 0.0

    async def answers(self) -> bool:
        """False also where it did not say so in time."""
        if self._asked is None or self._asked.done() or time.monotonic() > self._asked_at + LOST_SECONDS:
            self._asked, self._asked_at = Future(), time.monotonic()
            # A daemon: the end of the process waits for no answer.
            Thread(target=_answer, args=(self._ask, self._asked), name="probe", daemon=True).start()
        asked = asyncio.wrap_future(self._asked)
        done, _ = await asyncio.wait([asked], timeout=self._wait)
        return asked in done and asked.result()


def _answer(ask: Callable[[], bool], answer: "Future[bool]") -> None:
    try:
        answer.set_result(ask())
    except Exception as error:
        answer.set_exception(error)
