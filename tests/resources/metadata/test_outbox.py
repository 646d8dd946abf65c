"""Outbox: an event exists exactly if its change does, in commit order for every reader."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resources.metadata.database import Database
from resources.metadata.outbox import Event, emit, read_after

ROOT = Path(__file__).resolve().parents[3]


def write(database: Database, *keys: str, type: str = "t") -> list[int]:
    with database.write() as connection:
        return [emit(connection, "jobs", type, key, {"n": key}) for key in keys]


def keys(database: Database, seq: int = 0, **more: object) -> list[str]:
    with database.read() as connection:
        return [event.key for event in read_after(connection, seq, **more)]  # type: ignore[arg-type]


@pytest.mark.requirement("Q8")
def test_committed_event_is_read_with_its_payload_and_time(database: Database) -> None:
    (seq,) = write(database, "a")
    with database.read() as connection:
        (event,) = read_after(connection, 0)
    assert (event.seq, event.topic, event.type, event.key) == (seq, "jobs", "t", "a")
    assert event.payload == {"n": "a", "timestamp": event.created_at}


def test_rolled_back_event_is_not_read(database: Database) -> None:
    write(database, "a")
    with pytest.raises(RuntimeError), database.write() as connection:
        emit(connection, "jobs", "t", "b", {})
        raise RuntimeError
    write(database, "c")
    assert keys(database) == ["a", "c"]


KILLED = """
import os, signal, sys
from resources.metadata.database import Database
from resources.metadata.outbox import emit
database = Database(sys.argv[1])
with database.write() as connection:
    emit(connection, "jobs", "t", "killed", {})
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.requirement("Q9")
def test_a_writer_that_is_killed_before_its_commit_leaves_no_event(database: Database) -> None:
    write(database, "a")
    assert subprocess.run([sys.executable, "-c", KILLED, database.url], cwd=ROOT, check=False).returncode == -9
    write(database, "b")
    assert keys(database) == ["a", "b"]


def test_sequence_numbers_increase_and_are_never_reused(database: Database) -> None:
    """Otherwise a cursor that has passed a number would miss a later event with it."""
    first = write(database, "a", "b")
    with pytest.raises(RuntimeError), database.write() as connection:
        emit(connection, "jobs", "t", "lost", {})
        raise RuntimeError
    second = write(database, "c")
    assert first == sorted(first) and first[-1] < second[0]
    assert keys(database, first[0]) == ["b", "c"]


def test_events_are_read_by_type_after_a_number_up_to_a_limit(database: Database) -> None:
    write(database, *"abc", type="x")
    write(database, *"de", type="y")
    assert keys(database, types=["y"]) == ["d", "e"]
    assert keys(database, types=["x", "y"]) == [*"abcde"]
    assert keys(database, limit=2) == ["a", "b"]
    assert keys(database, 2, types=["x"]) == ["c"]


def test_reader_with_a_cursor_misses_no_event_of_concurrent_writers(database: Database) -> None:
    writers, each = 4, 25
    threads = [
        threading.Thread(target=lambda name=name: [write(database, f"{name}-{n}") for n in range(each)])  # type: ignore[misc]
        for name in range(writers)
    ]
    for thread in threads:
        thread.start()
    seen: list[str] = []
    events: list[Event] = []
    cursor = 0
    writing = True
    while writing or events:
        # Check this before the read: an event written between an empty read and the check would be missed.
        writing = any(thread.is_alive() for thread in threads)
        with database.read() as connection:
            events = read_after(connection, cursor, limit=7)
        seen += [event.key for event in events]
        cursor = events[-1].seq if events else cursor
    assert sorted(seen) == sorted(f"{name}-{n}" for name in range(writers) for n in range(each))
    for name in range(writers):
        mine = [key for key in seen if key.startswith(f"{name}-")]
        assert mine == [f"{name}-{n}" for n in range(each)]
