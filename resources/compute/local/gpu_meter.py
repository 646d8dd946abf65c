"""Metering of the GPUs that attempts on this machine hold."""

import logging
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from sqlalchemy.exc import SQLAlchemyError

from recipes.contracts.job import Job, Program
from resources.compute.base import JobKey
from resources.metadata.database import Database
from resources.metadata.gpu_usage import EXTEND_SECONDS, close_usage, extend_usage, open_usage
from resources.metadata.outbox import now_ms

log = logging.getLogger(__name__)

WATCHED_SECONDS = 10.0
"""An attempt that was seen running within this time is recorded as ended now."""


class Meter(Protocol):
    """Meter of the GPUs that attempts hold.

    Call `start` before a program starts, `extend` at each poll, `end` once the program is gone.
    """

    def start(self, job: Job, gpus: int) -> None: ...

    def extend(self, job: JobKey) -> None: ...

    def end(self, job: JobKey, last_sign: float) -> None:
        """Close the record of an attempt, which may have ended unobserved.

        `last_sign` is when the program last wrote something, in seconds since 1970.
        """


class NoMeter:
    """Records nothing."""

    def start(self, job: Job, gpus: int) -> None:
        pass

    def extend(self, job: JobKey) -> None:
        pass

    def end(self, job: JobKey, last_sign: float) -> None:
        pass


class GpuMeter:
    """Records GPU usage in the metadata database.

    Args:
        database: opens the metadata database when it is first needed.
        gpu_type: type of this machine's GPUs, for jobs that specify none.
    """

    def __init__(
        self,
        database: Callable[[], Database],
        gpu_type: Callable[[], str | None] = lambda: None,
        extend_seconds: float = EXTEND_SECONDS,
    ) -> None:
        self._open = database
        self._gpu_type = gpu_type
        self._database: Database | None = None
        self._extend_seconds = extend_seconds
        self._seen: dict[tuple[str, Program], float] = {}
        self._extended: dict[tuple[str, Program], float] = {}

    def start(self, job: Job, gpus: int) -> None:
        with self._connect().write() as connection:
            close_usage(connection, job)  # left open by an attempt whose end was not observed
            if gpus:
                gpu_type = job.hardware.gpu_type or self._gpu_type()
                open_usage(connection, job, uuid.uuid4().hex, gpus, gpu_type, now_ms())

    def extend(self, job: JobKey) -> None:
        key, now = (job.id, job.program), time.monotonic()
        self._seen[key] = now
        if now - self._extended.get(key, -self._extend_seconds) < self._extend_seconds:
            return
        try:
            with self._connect().write() as connection:
                extend_usage(connection, job, now_ms())
        except SQLAlchemyError as error:  # the next interval covers this one too
            log.warning("cannot record the GPU time of %s %s yet: %r", job.program, job.id, error)
        self._extended[key] = now

    def end(self, job: JobKey, last_sign: float) -> None:
        key = job.id, job.program
        is_watched = time.monotonic() - self._seen.get(key, -WATCHED_SECONDS) < WATCHED_SECONDS
        with self._connect().write() as connection:
            extend_usage(connection, job, now_ms() if is_watched else int(last_sign * 1000))
            close_usage(connection, job)
        self._seen.pop(key, None)
        self._extended.pop(key, None)

    def _connect(self) -> Database:
        if self._database is None:
            self._database = self._open()
        return self._database
