"""Buffer metrics and send them from a thread until the server acknowledges them."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from hanzo_ml.client.points import MAX_METRICS_PER_REQUEST, Point, ResumeFilter, drop_known_points, newest_repeated_step
from hanzo_ml.client.repeated_steps import RepeatedSteps
from hanzo_ml.client.retry import retry_delay
from hanzo_ml.client.transport import Refused, Transport, Unavailable

log = logging.getLogger(__name__)

MAX_CLOSING_DELAY_SECONDS = 0.5


class MetricTransport(Protocol):
    """The calls of the server that the buffer needs."""

    def log_metrics(self, run_id: str, points: Sequence[Point]) -> None: ...
    def newest_steps(self, run_id: str) -> dict[str, int]: ...
    def history(self, run_id: str, key: str) -> Iterator[tuple[int, int]]: ...
    def close(self) -> None: ...


class MetricBuffer:
    """A queue of one run's metrics, in order, and the thread that sends them.

    A point that is sent several times counts once, because the server identifies it by key, step, timestamp and value.
    """

    def __init__(self, tracking_uri: str, run_id: str, transport: MetricTransport | None = None) -> None:
        self.run_id = run_id
        self.refused: list[Point] = []
        self._transport: MetricTransport = transport or Transport(tracking_uri)
        self._queue: list[Point] = []
        self._num_restored = 0
        """Number of points at the head of the queue that a checkpoint had pending."""
        self._resume_step: int | None = None
        self._repeated_steps: Sequence[RepeatedSteps] = ()
        self._resumption: ResumeFilter | None = None
        self._condition = threading.Condition()
        self._closing = False
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def add(self, key: str, value: float, step: int = 0, timestamp: int | None = None) -> None:
        """Queue a value. `timestamp` is in milliseconds since 1970, by default now."""
        point = Point(key, float(value), int(step), time.time_ns() // 1_000_000 if timestamp is None else int(timestamp))
        with self._condition:
            if self._resumption is None or not self._resumption.is_known(point):
                self._enqueue([point])

    def pending(self) -> list[Point]:
        """Return the points that the server has not acknowledged, oldest first.

        A checkpoint stores them (`Point.to_json`).
        """
        with self._condition:
            return list(self._queue)

    def skip_until(self, step: int, repeated: Sequence[RepeatedSteps] = (), pending: Sequence[Point] = ()) -> None:
        """Skip points of steps that the server has, after a resume at `step`.

        Training logs the steps after `step` again. The sender first asks the server for the newest step of each key; until
        the answer arrives, values wait in the queue. Points that the checkpoint had `pending` are sent first, unless the
        server has their step. For the steps in `repeated`, which the run trains differently this time, the sender reads the
        histories: values from the first time do not count.

        Call it before the first `add`. Pending points are passed in the same call: otherwise the sender would wake up and
        send them before it knows that it has to ask the server.
        """
        with self._condition:
            self._resume_step = step
            self._repeated_steps = repeated
            self._num_restored = len(pending)
            self._queue = [*pending, *self._queue]
            self._start()

    def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the queue is empty, and return whether it is."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._queue and self._resume_step is None, timeout)

    def close(self, timeout: float) -> list[Point]:
        """Send the queue for up to `timeout` seconds; return what was not sent."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        with self._condition:
            self._abandoned = True
            self._condition.notify_all()
            return list(self._queue)

    def _enqueue(self, points: Sequence[Point]) -> None:
        self._queue.extend(points)
        if points:
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="hanzo-ml-metrics", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _send_all(self) -> None:
        """Run the sender thread until the buffer is closed and drained, or abandoned."""
        failures = 0
        while self._wait_for_work():
            try:
                self._fetch_newest_steps()
                self._send_next_batch()
                failures = 0
            except Unavailable as problem:
                failures += 1
                if failures == 1:
                    log.warning("the tracking server is unavailable, metrics are queued: %s", problem)
                self._pause(retry_delay(failures))
            except Exception:
                # No error may end the thread: queued metrics would never be sent.
                failures += 1
                log.exception("metrics could not be sent; trying again")
                self._pause(retry_delay(failures))
        self._transport.close()

    def _wait_for_work(self) -> bool:
        with self._condition:
            self._condition.wait_for(
                lambda: self._queue or self._resume_step is not None or self._closing or self._abandoned
            )
            return not self._abandoned and bool(self._queue or self._resume_step is not None)

    def _pause(self, delay: float) -> None:
        with self._condition:
            if self._closing:
                delay = min(delay, MAX_CLOSING_DELAY_SECONDS)
            self._condition.wait_for(lambda: self._abandoned, delay)

    def _fetch_newest_steps(self) -> None:
        with self._condition:
            step = self._resume_step
        if step is None:
            return
        try:
            newest = self._transport.newest_steps(self.run_id)
            newest_repeated = self._newest_repeated_steps(newest) if self._repeated_steps else {}
        except Refused as problem:
            log.warning("the tracking server does not know run %s: %s", self.run_id, problem)
            newest = newest_repeated = {}
        with self._condition:
            self._resumption = ResumeFilter(step, newest, self._repeated_steps, newest_repeated)
            restored, added = self._queue[: self._num_restored], self._queue[self._num_restored :]
            restored = [point for point in restored if not self._resumption.is_logged(point)]
            self._queue, self._num_restored = [*restored, *drop_known_points(added, self._resumption)], len(restored)
            self._resume_step = None
            self._condition.notify_all()

    def _newest_repeated_steps(self, keys: Iterable[str]) -> dict[str, int]:
        found = {key: newest_repeated_step(self._transport.history(self.run_id, key), self._repeated_steps) for key in keys}
        return {key: step for key, step in found.items() if step is not None}

    def _send_next_batch(self) -> None:
        with self._condition:
            if self._resume_step is not None:
                return  # requested meanwhile: first ask for the newest steps
            batch = list(islice(self._queue, MAX_METRICS_PER_REQUEST))
        refused = self._send(batch) if batch else []
        with self._condition:
            self.refused += refused
            del self._queue[: len(batch)]
            self._num_restored = max(0, self._num_restored - len(batch))
            self._condition.notify_all()

    def _send(self, points: Sequence[Point]) -> list[Point]:
        """Send points, and return those that the server refuses, which are found by bisection."""
        try:
            self._transport.log_metrics(self.run_id, points)
        except Refused as problem:
            if problem.concerns_run:
                log.warning("%s metrics were refused: %s", len(points), problem)
                return list(points)
            if len(points) == 1:
                log.warning("metric %s at step %s was refused: %s", points[0].key, points[0].step, problem)
                return list(points)
            half = len(points) // 2
            return self._send(points[:half]) + self._send(points[half:])
        return []
