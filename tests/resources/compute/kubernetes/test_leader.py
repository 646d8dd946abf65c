"""Leader election: one controller at a time; one whose session ended cannot write."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import text

from resources.compute.kubernetes.controller import leader
from resources.compute.kubernetes.controller.leader import LeadershipLost, RowLocked, lead
from resources.metadata.database import Database
from tests.support.postgres_server import migrated_sqlite, postgres, postgres_url, sqlite_url

__all__ = ["migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def stopped() -> Iterator[threading.Event]:
    stopped = threading.Event()
    yield stopped
    stopped.set()


def test_second_controller_leads_when_the_first_has_ended(url: str, tmp_path: Path, stopped: threading.Event) -> None:
    order: list[str] = []

    def follow() -> None:
        with lead(url, 5, tmp_path / "lock", stopped):
            order.append("second leads")

    with lead(url, 5, tmp_path / "lock", stopped) as database:
        second = threading.Thread(target=follow)
        second.start()
        with database.write() as connection:
            connection.execute(text("SELECT 1"))
        time.sleep(0.2)
        order.append("first ends")
    second.join(30)
    assert order == ["first ends", "second leads"]


def test_waiting_ends_when_it_is_stopped(url: str, tmp_path: Path, stopped: threading.Event) -> None:
    with lead(url, 5, tmp_path / "lock", stopped):
        stopped.set()
        with pytest.raises(LeadershipLost), lead(url, 5, tmp_path / "lock", stopped):
            pass


def test_leader_whose_session_was_ended_cannot_write(postgres_url: str, tmp_path: Path, stopped: threading.Event) -> None:
    with ExitStack() as stack:
        database = stack.enter_context(lead(postgres_url, 5, tmp_path / "lock", stopped))
        with database.read() as connection:
            session = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        other = Database(postgres_url)
        stack.callback(other.close)
        with other.write() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:session)"), {"session": session})
        with pytest.raises(LeadershipLost), database.write() as connection:
            connection.execute(text("SELECT 1"))
        with pytest.raises(LeadershipLost), database.write() as connection:
            connection.execute(text("SELECT 1"))


def test_row_locked_by_another_session_does_not_block_the_leader(
    postgres_url: str, tmp_path: Path, stopped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "LOCK_SECONDS", 1)
    other = Database(postgres_url)
    with other.write() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS held (id int)"))
        connection.execute(text("INSERT INTO held VALUES (1)"))
    with lead(postgres_url, 5, tmp_path / "lock", stopped) as database:
        with other.write() as holder:
            holder.execute(text("SELECT * FROM held FOR UPDATE"))
            with pytest.raises(RowLocked), database.write() as connection:
                connection.execute(text("UPDATE held SET id = 2"))
        with database.write() as connection:  # it is still the leader
            connection.execute(text("UPDATE held SET id = 2"))
    other.close()


def test_session_of_a_vanished_leader_is_ended_by_the_server(
    postgres_url: str, tmp_path: Path, stopped: threading.Event
) -> None:
    with lead(postgres_url, 5, tmp_path / "lock", stopped) as database, database.read() as connection:
        shown = [
            connection.execute(text(f"SHOW {name}")).scalar_one() for name in ("tcp_keepalives_count", "tcp_user_timeout")
        ]
        local = connection.execute(text("SELECT inet_server_addr() IS NULL")).scalar_one()
    assert shown == (["0", "0"] if local else ["2", "15s"])
