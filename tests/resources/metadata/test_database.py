"""Timeouts for a PostgreSQL server that does not respond."""

from typing import Any

import pytest
from sqlalchemy import event

from resources.metadata.database import Database


class Seen(Exception):
    """Carry the arguments of the driver instead of connecting."""


def driver_arguments(url: str, *seconds: int) -> dict[str, Any]:
    database = Database(url, *seconds)

    @event.listens_for(database.engine, "do_connect")
    def stop(_: object, __: object, ___: object, parameters: dict[str, Any]) -> None:
        raise Seen(parameters)

    with pytest.raises(Seen) as seen, database.read():
        pass
    [found] = seen.value.args
    return dict(found)


def test_silent_host_times_out_while_connecting_and_afterwards() -> None:
    found = driver_arguments("postgresql://h/d", 6)
    assert (found["connect_timeout"], found["tcp_user_timeout"]) == (6, 6000)
    assert [found[f"keepalives_{word}"] for word in ("idle", "interval", "count")] == [2, 2, 3]
    assert driver_arguments("postgresql://h/d")["connect_timeout"] == 10


def test_timeouts_in_the_address_take_precedence() -> None:
    found = driver_arguments("postgresql://h/d?connect_timeout=60&keepalives_idle=30", 6)
    assert (found["connect_timeout"], found["keepalives_idle"], found["keepalives_interval"]) == ("60", "30", 2)
