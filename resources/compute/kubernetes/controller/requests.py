"""Requests to the API server, several at a time: each waits for webhooks and for etcd, and hundreds may be due at once."""

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
        """Carry out independent calls. Returns for each what it returned, or why it failed, in their order."""
        return list(self._threads.map(catch_error, calls))


def catch_error(call: Callable[[], T]) -> T | ClusterError:
    try:
        return call()
    except ClusterError as problem:
        return problem
