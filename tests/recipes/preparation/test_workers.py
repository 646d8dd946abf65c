"""Arguments common to all calls of a unit are sent to each process once."""

from functools import partial
from operator import add, neg
from typing import Any

from recipes.preparation.workers import Workers


class Seven:
    """Counts how often it is pickled; it unpickles as 7."""

    sent = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Seven.sent += 1
        return int, (7,)


def test_bound_arguments_are_sent_once_per_worker() -> None:
    with Workers(1) as workers:
        assert list(workers.run(partial(add, Seven()), [(number,) for number in range(20)])) == [*range(7, 27)]
        assert Seven.sent == 1
        assert list(workers.run(neg, [(4,), (5,)])) == [-4, -5]
        assert list(workers.run(neg, [])) == []
