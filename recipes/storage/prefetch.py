"""Several things that are done at the same time, and come in the order in which they were asked for."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetch(work: Callable[[T], R], items: Iterable[T], max_in_flight: int) -> Iterator[R]:
    """The results of `work`, by threads that are never further ahead of whoever takes them than `max_in_flight`.

    Raises the first error in that order; what has not begun by then never does, and what has is waited for.
    """
    with ThreadPoolExecutor(max_in_flight) as threads:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(threads.submit(work, item))
                if len(pending) == max_in_flight:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
