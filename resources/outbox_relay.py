"""`python -m resources.outbox_relay`: events to Kafka, at least once and in order for each key (rows Q1-Q3, Q7, Q9).

The events table is the log, Kafka has a copy. How far it has one stands in the database, and moves only when the brokers
have acknowledged all before: killed at any moment, the relay sends again what it had not noted. `seq`, in every message,
tells a consumer what it knows already. While no broker answers, the events wait where they are, and nothing waits for them.
Only behind a message that the brokers themselves refuse may another of its key come first.

What belongs here: reading, sending, remembering. What does not: what an event says, which is whoever emits it.
"""

import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.metadata.database import Database
from resources.metadata.job_record import mask_payload
from resources.metadata.outbox import Event, advance_position, read_after, read_position
from resources.service_logs import configure_logs
from resources.settings.settings import Settings
from resources.stack.detached_process import lock_folder

log = logging.getLogger(__name__)

READER_NAME = "kafka"
MAX_BATCH = 200
POLL_SECONDS = 0.5
RETRY_SECONDS = 2.0
ANSWER_TIMEOUT_SECONDS = 5.0
ACKNOWLEDGEMENT_TIMEOUT_SECONDS = 10.0
MAX_VALUE_BYTES = 900_000
"""Bytes of a message: brokers take 1 MB, with its key and headers, unless they are told otherwise."""
POSTGRES_RELAY_LOCK = 57_000_003
SENDING_MESSAGE = "events are sent"


@dataclass(frozen=True)
class KafkaRecord:
    """A message of Kafka. The key decides the partition, and so what stays in order."""

    topic: str
    key: str
    value: bytes


class DeliveryError(Exception):
    """Some of the messages were not acknowledged; the text says why. Before the first of those, `delivered` others were."""

    def __init__(self, reason: str, delivered: int = 0) -> None:
        super().__init__(reason)
        self.delivered = delivered


def to_record(event: Event, prefix: str) -> KafkaRecord:
    """The event's payload, with its name and number beside it.

    One that no broker would take says how large it is, and where it can be read: without it, all behind it would wait.
    """
    named = {"event": event.type, "seq": event.seq}
    value = json.dumps({**mask_payload(event.payload), **named}, separators=(",", ":")).encode()
    if len(value) > MAX_VALUE_BYTES:
        report = {"key": event.key, "timestamp": event.created_at, "too_large": len(value)}
        value = json.dumps({**report, "read_at": f"/v1/events?after={event.seq - 1}&limit=1", **named}).encode()
    return KafkaRecord(f"{prefix}.{event.topic}", event.key, value)


class KafkaPublisher:
    """The brokers. A producer that failed is given up with all that it still holds, so that nothing of it comes late."""

    def __init__(self, brokers: str, security: Mapping[str, str] | None = None) -> None:
        """`security` is how they are signed in to, in librdkafka's words."""
        self._brokers = brokers
        self._security = dict(security or {})
        self._producer: Producer | None = None
        self._connection_error = ""

    def send(self, records: Sequence[KafkaRecord]) -> None:
        """Returns when the brokers have acknowledged all of them, each written to all replicas that are in sync.

        Raises:
            DeliveryError: they have not. Of those behind the first one that is not there, some may be.
        """
        self._connection_error = ""
        missing = dict(enumerate(records))
        problems: dict[int, str] = {}

        def report(number: int, error: KafkaError | None, message: Message) -> None:
            if error is None:
                del missing[number]
            else:
                problems[number] = f"{message.topic()}: {error.str()}"

        try:
            if self._producer is None:
                self._producer = self._connected()
            for number, record in missing.copy().items():
                on_delivery = partial(report, number)
                self._producer.produce(record.topic, value=record.value, key=record.key, on_delivery=on_delivery)
            self._producer.flush(ACKNOWLEDGEMENT_TIMEOUT_SECONDS + 5)
        except (KafkaException, BufferError) as error:
            self.close()
            raise DeliveryError(self._connection_error or str(error)) from error
        if missing:
            self.close()
            first = min(missing)
            raise DeliveryError(problems.get(first) or self._connection_error or "no answer", first)

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.poll(0)  # what it would have called keeps it alive

    def _connected(self) -> Producer:
        """Raises KafkaException where no broker answers: an address that is wrong is noticed before there is an event."""
        producer = Producer(
            {
                "bootstrap.servers": self._brokers,
                "client.id": "hanzo-ml",
                "enable.idempotence": True,  # a retry within the producer neither doubles nor overtakes
                "message.timeout.ms": int(ACKNOWLEDGEMENT_TIMEOUT_SECONDS * 1000),
                "compression.type": "zstd",
                "error_cb": self._note,
                "log_level": 0,  # it would log every attempt to connect
                **self._security,
            }
        )
        try:
            producer.list_topics(timeout=ANSWER_TIMEOUT_SECONDS)
        finally:
            producer.poll(0)  # calls `_note`
        return producer

    def _note(self, error: KafkaError) -> None:
        """What is wrong with the connections: a message itself only says that it was not acknowledged in time."""
        self._connection_error = error.str()


class Relay:
    def __init__(self, database: Database, kafka: KafkaPublisher, prefix: str) -> None:
        self._database = database
        self._kafka = kafka
        self._prefix = prefix
        self._batch = MAX_BATCH

    def send_next(self) -> int:
        """Send the next events, and note that they were sent. Returns how many there were.

        Where one is not delivered, fewer are sent at once until all are again: else the others would be sent anew each time.

        Raises:
            DeliveryError, SQLAlchemyError: what was not noted comes first the next time.
        """
        with self._database.read() as connection:
            events = read_after(connection, read_position(connection, READER_NAME), limit=self._batch)
        try:
            self._kafka.send([to_record(event, self._prefix) for event in events])
        except DeliveryError as error:
            self._batch = 1
            self._note(events[: error.delivered])
            raise
        self._batch = min(2 * self._batch, MAX_BATCH)
        self._note(events)
        return len(events)

    def _note(self, sent: Sequence[Event]) -> None:
        if sent:
            with self._database.write() as connection:
                advance_position(connection, READER_NAME, sent[-1].seq)


@contextmanager
def exclusive_relay(database: Database, folder: Path, stopped: threading.Event) -> Iterator[Callable[[], None]]:
    """While the block runs, no other relay of this database sends: everything would be sent twice, each time in order.

    It begins when the other one ended, or when it is stopped. What it yields raises SQLAlchemyError where the database was
    lost, and with it the lock: asked before each batch, so that no more than one is sent twice.
    """
    if database.engine.dialect.name != "postgresql":
        folder.mkdir(parents=True, exist_ok=True)
        while not stopped.is_set():
            with lock_folder(folder) as descriptor:
                if descriptor is not None:
                    yield lambda: None
                    return
            stopped.wait(POLL_SECONDS)
        yield lambda: None
        return
    with database.read() as connection:
        try:
            ask = text("SELECT pg_try_advisory_lock(:lock)")
            while not connection.execute(ask, {"lock": POSTGRES_RELAY_LOCK}).scalar_one() and not stopped.is_set():
                stopped.wait(POLL_SECONDS)
            yield lambda: connection.execute(text("SELECT 1")).close()
        finally:
            connection.invalidate()  # the lock is the session's, which the pool would keep


def run(settings: Settings, stopped: threading.Event) -> None:
    """Until it is stopped. Whatever fails is tried again, and said once.

    Raises:
        BadConfiguration: no broker is set.
    """
    if settings.stream.brokers is None:
        raise BadConfiguration("no Kafka: set stream.brokers, such as kafka:9092 (HANZO_ML_STREAM_BROKERS)")
    database = Database(settings.database_url, settings.database.connect_seconds)
    kafka = KafkaPublisher(settings.stream.brokers, settings.stream.security)
    relay = Relay(database, kafka, settings.stream.topic_prefix)
    last_message = ""
    while not stopped.is_set():
        try:
            with exclusive_relay(database, settings.home / "relay", stopped) as check:
                while not stopped.is_set():
                    check()
                    sent = relay.send_next()
                    if last_message != SENDING_MESSAGE:
                        log.info(
                            "%s to %s, as topics %s.*",
                            SENDING_MESSAGE,
                            settings.stream.brokers,
                            settings.stream.topic_prefix,
                        )
                        last_message = SENDING_MESSAGE
                    if not sent:
                        stopped.wait(POLL_SECONDS)
        except (DeliveryError, SQLAlchemyError) as error:
            problem = str(error).splitlines()[0]
            if problem != last_message:
                log.warning("events wait in the database, and are sent when this is over: %s", problem)
            last_message = problem
            stopped.wait(RETRY_SECONDS)
    kafka.close()
    database.close()


def main() -> int:
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        settings = Settings.load()
        configure_logs(settings.logging.level, settings.logging.format)
        run(settings, stopped)
    except BadConfiguration as problem:
        print(f"hanzo-ml: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
