"""Outbox relay: all events reach Kafka, ordered per key, despite crashes."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from recipes.contracts.job import EXIT_BAD_CONFIGURATION
from resources.metadata.database import Database
from resources.metadata.outbox import Event, emit, read_position
from resources.outbox_relay import MAX_VALUE_BYTES, READER_NAME, DeliveryError, KafkaPublisher, Relay, to_record
from resources.settings.settings import Settings
from resources.stack.services import list_services
from tests.resources.metadata.conftest import database, database_url, migrated_sqlite, postgres, postgres_url, sqlite_url
from tests.support.kafka_brokers import Brokers, brokers
from tests.support.resources.model_versions import RegisteredVersions
from tests.support.server_process import REPOSITORY, free_port

__all__ = ["brokers", "database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]

DEADLINE = 60.0


def position(database: Database) -> int:
    with database.read() as connection:
        return read_position(connection, READER_NAME)


def write(database: Database, keys: list[str], topic: str = "jobs") -> None:
    """Write an event for each of the keys, with its position among them."""
    with database.write() as connection:
        for number, key in enumerate(keys):
            emit(connection, topic, "test.counted", key, {"number": number})


@pytest.mark.requirement("P8", "Q3")
def test_model_events_are_sent_to_their_topic_with_the_specified_fields(database: Database, brokers: Brokers) -> None:
    versions = RegisteredVersions(database)
    versions.register("r1")
    versions.promote(1)
    relay = Relay(database, KafkaPublisher(brokers.addresses), "hanzo.ml")
    assert relay.send_next() > 0
    assert relay.send_next() == 0
    received = {message.value["event"]: message for message in brokers.received("hanzo.ml.models")}
    for event, facts in (
        ("model.registered", {"name": "m", "version": 1, "run_id": "r1"}),
        ("model.promoted", {"name": "m", "version": 1, "stage": "production"}),
    ):
        [written] = versions.events(event)
        assert received[event].key == "m"
        assert facts.items() <= received[event].value.items()
        assert received[event].value == {**written.payload, "event": event, "seq": written.seq}
        assert abs(received[event].value["timestamp"] / 1000 - time.time()) < DEADLINE


def test_unacknowledged_events_are_sent_again_before_newer_ones(
    sqlite_url: str, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resources.outbox_relay.ANSWER_TIMEOUT_SECONDS", 1.0)
    database = Database(sqlite_url)
    write(database, ["a", "b"])
    nobody = KafkaPublisher(f"127.0.0.1:{free_port()}")
    for _ in range(2):
        with pytest.raises(DeliveryError, match="refused"):
            Relay(database, nobody, "hanzo.ml").send_next()
        assert position(database) == 0
    write(database, ["c"])
    assert Relay(database, KafkaPublisher(brokers.addresses), "hanzo.ml").send_next() == 3
    assert sorted(message.key for message in brokers.received("hanzo.ml.jobs")) == ["a", "b", "c"]


def test_oversized_event_is_replaced_by_a_reference_and_does_not_block_others(sqlite_url: str, brokers: Brokers) -> None:
    database = Database(sqlite_url)
    with database.write() as connection:
        large = emit(connection, "jobs", "job.submitted", "large", {"config": "x" * 2 * MAX_VALUE_BYTES})
        emit(connection, "jobs", "job.submitted", "small", {"config": "x" * (MAX_VALUE_BYTES - 1000)})
    assert Relay(database, KafkaPublisher(brokers.addresses), "hanzo.ml").send_next() == 2
    received = {message.key: message.value for message in brokers.received("hanzo.ml.jobs")}
    assert len(received["small"]["config"]) == MAX_VALUE_BYTES - 1000
    assert received["large"]["seq"] == large and received["large"]["event"] == "job.submitted"
    assert received["large"]["read_at"] == f"/v1/events?after={large - 1}&limit=1"
    assert received["large"]["too_large"] > 2 * MAX_VALUE_BYTES


def test_events_before_an_undeliverable_one_are_sent_and_recorded_once(
    sqlite_url: str, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: all of them were sent again on each try while one topic failed."""
    database = Database(sqlite_url)
    write(database, ["a", "b"])
    with database.write() as connection:
        emit(connection, "jobs", "job.submitted", "large", {"config": "x" * 2_000_000})
    write(database, ["c"])
    relay = Relay(database, KafkaPublisher(brokers.addresses), "hanzo.ml")
    with monkeypatch.context() as refused:
        refused.setattr("resources.outbox_relay.MAX_VALUE_BYTES", 10_000_000)  # now the brokers refuse it
        for _ in range(10):
            with suppress(DeliveryError):
                relay.send_next()
        assert position(database) == 2
    while position(database) < 4:
        relay.send_next()
    received = [message.key for message in brokers.received("hanzo.ml.jobs")]
    assert set(received) == {"a", "b", "large", "c"} and len(received) < 8


@pytest.mark.requirement("Q7")
def test_a_payload_cannot_pass_for_another_event() -> None:
    record = to_record(Event(7, "audit", "acme/ann", "audit.call", {"event": "model.promoted", "seq": 1}, 0), "hanzo.ml")
    assert (record.topic, record.key) == ("hanzo.ml.audit", "acme/ann")
    assert record.value == b'{"event":"audit.call","seq":7}'


class Relays:
    """Run relays as processes on one database."""

    def __init__(self, database: Database, brokers: Brokers, home: Path) -> None:
        url = database.engine.url.set(drivername=database.engine.dialect.name).render_as_string(hide_password=False)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HANZO_ML_")}
        self._environment = {
            **clean,
            "HANZO_ML_HOME": str(home),
            "HANZO_ML_DATABASE_URL": url,
            "HANZO_ML_STREAM_BROKERS": brokers.addresses,
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        command = [sys.executable, "-m", "resources.outbox_relay"]
        self.processes.append(subprocess.Popen(command, cwd=REPOSITORY, env=self._environment))

    def kill(self) -> None:
        victim = self.processes.pop(random.randrange(len(self.processes)))
        victim.kill()
        victim.wait()

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            assert process.wait(DEADLINE) in (0, -signal.SIGTERM), "the latter while it was still loading"


@pytest.fixture
def relays(database: Database, brokers: Brokers, tmp_path: Path) -> Iterator[Relays]:
    relays = Relays(database, brokers, tmp_path)
    yield relays
    for process in relays.processes:
        process.kill()


def wait_until_sent(database: Database, written: int) -> None:
    end = time.monotonic() + DEADLINE
    while position(database) < written:
        assert time.monotonic() < end, f"{position(database)} of {written}"
        time.sleep(0.05)


def test_relay_exits_cleanly_on_sigterm(database: Database, relays: Relays) -> None:
    relays.start()
    write(database, ["a"])
    wait_until_sent(database, 1)
    [process] = relays.processes
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 0


@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.long)])
def test_two_relays_that_are_killed_at_random_lose_nothing_and_keep_the_order_of_each_key(
    database: Database, brokers: Brokers, relays: Relays, kills: int
) -> None:
    """One relay is the standby of the other.

    A message may arrive twice, with the same number.
    """
    relays.start()
    relays.start()
    keys = [f"k{number}" for number in range(7)]
    written = 0
    for _ in range(kills):
        for _ in range(random.randrange(1, 40)):
            write(database, keys)
            written += len(keys)
        time.sleep(random.uniform(0, 1.5))
        relays.kill()
        relays.start()
    wait_until_sent(database, written)
    relays.stop()
    received = brokers.received("hanzo.ml.jobs")
    assert len({message.value["seq"] for message in received}) == written
    for key in keys:
        numbers = [message.value["seq"] for message in received if message.key == key]
        fresh = [number for place, number in enumerate(numbers) if number not in numbers[:place]]
        assert fresh == sorted(fresh), key


@pytest.mark.requirement("Q8")
def test_relay_service_exists_only_when_brokers_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "relay" not in [service.name for service in list_services(Settings.load())]
    monkeypatch.setenv("HANZO_ML_STREAM_BROKERS", "kafka:9092")
    assert "relay" in [service.name for service in list_services(Settings.load())]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HANZO_ML_HOME", "/tmp", "set stream.brokers"),
        ("HANZO_ML_STREAM_BROKERS", "kafka 9092", "kafka-0:9092,kafka-1:9092"),
        ("HANZO_ML_STREAM_TOPIC_PREFIX", "hanzo ml", "topic_prefix"),
    ],
)
def test_relay_without_a_valid_destination_names_the_setting(variable: str, value: str, said: str) -> None:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("HANZO_ML_")}
    command = [sys.executable, "-m", "resources.outbox_relay"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**clean, variable: value}, capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_BAD_CONFIGURATION, done.stderr
    assert said in done.stderr and done.stderr.count("\n") == 1
