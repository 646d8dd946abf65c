"""`python -m resources.outbox_relay`: relay events to Kafka, at least once and in order per key.

The events table is the log, Kafka has a copy. The position of the copy is stored in the database, and advances only when
the brokers have acknowledged all earlier events: after a kill at any point, the relay resends what is not yet recorded.
Consumers detect duplicates by `seq`, which is in every message. During an outage of the brokers events wait in the table and
block nothing. Order is broken only when the brokers reject a message: later ones of its key may then arrive first.
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
"""Limit of a message's size: brokers accept 1 MB by default, including key and headers."""
POSTGRES_RELAY_LOCK = 57_000_003
SENDING_MESSAGE = "events are sent"


@dataclass(frozen=True)
class KafkaRecord:
    """A Kafka message. The key selects the partition, and thereby what stays in order."""

    topic: str
    key: str
    value: bytes


class DeliveryError(Exception):
    """Raised when messages were not acknowledged; `delivered` counts those before the first one."""

    def __init__(self, reason: str, delivered: int = 0) -> None:
        super().__init__(reason)
        self.delivered = delivered


def to_record(event: Event, prefix: str) -> KafkaRecord:
    """Return the message of an event: its payload, type and sequence number.

    A payload that is too large for the brokers is replaced by its size and a link, so that it cannot block later events.
    """
    named = {"event": event.type, "seq": event.seq}
    value = json.dumps({**mask_payload(event.payload), **named}, separators=(",", ":")).encode()
    if len(value) > MAX_VALUE_BYTES:
        report = {"key": event.key, "timestamp": event.created_at, "too_large": len(value)}
        value = json.dumps({**report, "read_at": f"/v1/events?after={event.seq - 1}&limit=1", **named}).encode()
    return KafkaRecord(f"{prefix}.{event.topic}", event.key, value)


class KafkaPublisher:
    """Publishes to Kafka. Discards a failed producer's queue, so no message arrives late."""

    def __init__(self, brokers: str, security: Mapping[str, str] | None = None) -> None:
        """`security` holds librdkafka's authentication settings."""
        self._brokers = brokers
        self._security = dict(security or {})
        self._producer: Producer | None = None
        self._connection_error = ""

    def send(self, records: Sequence[KafkaRecord]) -> None:
        """Send records, and return once all in-sync replicas have acknowledged them.

        Raises:
            DeliveryError: some are missing. Records after the first missing one may have arrived.
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
            producer.poll(0)  # pending callbacks would keep it alive

    def _connected(self) -> Producer:
        """Return a producer; raises KafkaException if no broker answers, even before the first event."""
        producer = Producer(
            {
                "bootstrap.servers": self._brokers,
                "client.id": "hanzo-ml",
                "enable.idempotence": True,  # retries within the producer neither duplicate nor reorder
                "message.timeout.ms": int(ACKNOWLEDGEMENT_TIMEOUT_SECONDS * 1000),
                "compression.type": "zstd",
                "error_cb": self._note,
                "log_level": 0,  # otherwise it logs every connection attempt
                **self._security,
            }
        )
        try:
            producer.list_topics(timeout=ANSWER_TIMEOUT_SECONDS)
        finally:
            producer.poll(0)  # calls `_note`
        return producer

    def _note(self, error: KafkaError) -> None:
        """Record a connection problem; a message's own error only says that it timed out."""
        self._connection_error = error.str()


class Relay:
    def __init__(self, database: Database, kafka: KafkaPublisher, prefix: str) -> None:
        self._database = database
        self._kafka = kafka
        self._prefix = prefix
        self._batch = MAX_BATCH

    def send_next(self) -> int:
        """Send the next events and record the position. Returns their number.

        After a failed delivery the batch size is reduced, or the events around it would be resent each time. It grows again
        while deliveries succeed.

        Raises:
            DeliveryError, SQLAlchemyError: unrecorded events are sent first the next time.
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
    """Hold the lock of the only sending relay; a second one would send everything twice.

    Waits until the other relay ends, or until `stopped`. The yielded check raises SQLAlchemyError if the database session,
    and with it the lock, was lost: called before each batch, it limits duplicates to one batch.
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
            connection.invalidate()  # the lock belongs to the session, which the pool would keep open


def run(settings: Settings, stopped: threading.Event) -> None:
    """Relay events until `stopped`; failures are retried and logged once.

    Raises:
        BadConfiguration: no broker is set.
    """
    if settings.stream.brokers is None:
        raise BadConfiguration("Kafka is not configured: set stream.brokers, such as kafka:9092 (HANZO_ML_STREAM_BROKERS)")
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
                log.warning("events wait in the database until Kafka accepts them again: %s", problem)
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
