"""Retry policies: pauses between attempts and time limits."""

from collections.abc import Callable

import pytest
from tenacity import Retrying

from recipes.storage.retry import after_pauses, every


class Outage(Exception):
    pass


def failing(times: int) -> Callable[[], str]:
    """Return a call that fails a number of times and then succeeds."""
    failures = iter(range(times))

    def call() -> str:
        if next(failures, None) is not None:
            raise Outage
        return "done"

    return call


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", found.append)
    return found


def test_each_pause_is_followed_by_one_attempt(pauses: list[float]) -> None:
    assert Retrying(**after_pauses(1.0, 4.0))(failing(2)) == "done"
    assert pauses == [1.0, 4.0]


@pytest.mark.parametrize("seconds", [(), (1.0, 4.0)])
def test_last_error_is_raised_after_the_last_pause(seconds: tuple[float, ...], pauses: list[float]) -> None:
    with pytest.raises(Outage):
        Retrying(**after_pauses(*seconds))(failing(len(seconds) + 1))
    assert pauses == [*seconds]


def test_attempts_end_at_the_limit(pauses: list[float]) -> None:
    assert Retrying(**every(2.0, limit_seconds=60.0))(failing(2)) == "done"
    assert pauses == [2.0, 2.0]
    with pytest.raises(Outage):
        Retrying(**every(2.0, limit_seconds=0.0))(failing(1))
    assert pauses == [2.0, 2.0]
