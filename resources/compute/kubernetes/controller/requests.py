"""Concurrent requests to the API server.

Each waits for webhooks and etcd, and hundreds may be due at once.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from resources.compute.kubernetes.cluster import ClusterError

MAX_CONCURRENT = 8

T = TypeVar("T")


class Requests:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="request")

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | ClusterError]:
        """Run independent calls; return the result or error of each, in order."""
        return list(self._threads.map(catch_error, calls))


def catch_error(call: Callable[[], T]) -> T | ClusterError:
    try:
        return call()
    except ClusterError as problem:
        return problem
