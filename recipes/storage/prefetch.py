"""Several things that are done at the same time, and come in the order in which they were asked for."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(work: Callable[[T], R], of: Iterable[T], at_once: int) -> Iterator[R]:
    """The results of `work`, by threads that are never further ahead of whoever takes them than `at_once`.

    Raises the first error in that order; what has not begun by then never does, and what has is waited for.
    """
    with ThreadPoolExecutor(at_once) as threads:
        coming: deque[Future[R]] = deque()
        try:
            for item in of:
                coming.append(threads.submit(work, item))
                if len(coming) == at_once:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
