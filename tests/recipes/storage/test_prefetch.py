"""What is done at the same time comes in its order, and ends at its first error."""

import threading
import time

import pytest

from recipes.storage.object_transfer import prefetch


def test_results_come_in_the_order_of_what_was_asked_for() -> None:
    def slowest_first(number: int) -> int:
        time.sleep(0.05 if number == 0 else 0)
        return -number

    assert list(prefetch(slowest_first, range(20), 4)) == [-number for number in range(20)]
    assert list(prefetch(slowest_first, [], 4)) == []


def test_so_many_are_under_way_at_once_and_no_more() -> None:
    all_are_here = threading.Barrier(4)
    lock, now, most = threading.Lock(), 0, 0

    def work(number: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        all_are_here.wait(60)  # breaks where fewer are at work together
        with lock:
            now -= 1

    list(prefetch(work, range(8), 4))
    assert most == 4


def test_nobody_runs_far_ahead_of_whoever_takes() -> None:
    """What is held are results: of an object that is read, its bytes."""
    begun: list[int] = []
    coming = prefetch(begun.append, range(100), 4)
    next(coming)
    time.sleep(0.1)
    assert len(begun) <= 5
    coming.close()
    assert len(begun) <= 5


def test_the_first_error_ends_it_and_what_has_not_begun_never_does() -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise OSError("the third")

    with pytest.raises(OSError, match="the third"):
        list(prefetch(work, range(1000), 2))
    assert len(begun) < 6


def test_one_at_a_time_is_one_after_the_other() -> None:
    def work(number: int) -> str:
        return threading.current_thread().name

    assert len({*prefetch(work, range(5), 1)}) == 1
