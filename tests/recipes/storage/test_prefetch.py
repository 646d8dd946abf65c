"""Prefetch: concurrent results keep their order and end at the first error."""

import threading
import time

import pytest

from recipes.storage.object_transfer import prefetch


def test_prefetch_returns_results_in_input_order() -> None:
    def slowest_first(number: int) -> int:
        time.sleep(0.05 if number == 0 else 0)
        return -number

    assert list(prefetch(slowest_first, range(20), 4)) == [-number for number in range(20)]
    assert list(prefetch(slowest_first, [], 4)) == []


def test_prefetch_runs_exactly_the_given_number_at_once() -> None:
    all_are_here = threading.Barrier(4)
    lock, now, most = threading.Lock(), 0, 0

    def work(number: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        all_are_here.wait(60)  # fails if fewer run concurrently
        with lock:
            now -= 1

    list(prefetch(work, range(8), 4))
    assert most == 4


def test_prefetch_does_not_run_far_ahead_of_its_consumer() -> None:
    """Prefetched results, such as the bytes of an object, are held in memory."""
    begun: list[int] = []
    coming = prefetch(begun.append, range(100), 4)
    next(coming)
    time.sleep(0.1)
    assert len(begun) <= 5
    coming.close()
    assert len(begun) <= 5


def test_prefetch_stops_at_the_first_error() -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise OSError("the third")

    with pytest.raises(OSError, match="the third"):
        list(prefetch(work, range(1000), 2))
    assert len(begun) < 6


def test_prefetch_with_concurrency_one_is_sequential() -> None:
    def work(number: int) -> str:
        return threading.current_thread().name

    assert len({*prefetch(work, range(5), 1)}) == 1
