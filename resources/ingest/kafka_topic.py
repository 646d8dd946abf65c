"""Read a Kafka topic as a raw file of JSON lines.

It has one line for each message, ordered by partition and offset.

The range is determined once: from the offsets in the address, or the oldest available ones, up to the current end of each
partition. Later messages are for the next version. `kafka_address` parses the address; this module connects to the brokers.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from resources.errors import ErrorCode, HanzoError, conflict, invalid, not_found
from resources.ingest.json_lines import parse_record
from resources.ingest.kafka_address import OffsetRange, TopicAddress, resolve_ranges
from resources.ingest.problems import Problem, Problems
from resources.ingest.source_files import SourceFile

ANSWER_TIMEOUT_SECONDS = 10.0
MAX_FETCH_KILOBYTES = 16_384
"""Maximum amount of messages prefetched into memory; librdkafka's own limit is four times that."""
TOMBSTONE_PROBLEM = "has no value (a tombstone): skip such messages with tombstones=skip"
ADVICE = "read around it with from= and until=, or correct the producer"


def topic_source(address: TopicAddress, security: Mapping[str, str]) -> SourceFile:
    """Return the messages to which an address refers now.

    Args:
        security: authentication settings of the brokers, in librdkafka's terms.

    Raises:
        HanzoError: no broker answers, or there is no such topic or message.
    """
    with connected_topic(address, security) as found:
        ranges = resolve_ranges(address, found.read_watermarks())
    if all(each.first == each.until for each in ranges):
        raise empty_topic_error(address)

    @contextmanager
    def opened() -> Iterator[BinaryIO]:
        with tempfile.TemporaryFile() as file:
            with connected_topic(address, security) as source:
                write_lines(address, source, ranges, file)
            file.seek(0)
            yield file

    return SourceFile(f"{address.topic}.jsonl", opened, origin=address.pinned_address(ranges))


def write_lines(address: TopicAddress, source: "TopicReader", ranges: Sequence[OffsetRange], file: BinaryIO) -> None:
    """Write each message's value to a line.

    All messages are read first, so that all problems are reported together.
    """
    problems = Problems()
    is_empty = True
    for each in ranges:
        for message in source.messages(each):
            value = message.value()
            if value is None and address.skips_tombstones:
                continue
            is_empty = False
            # Between the parts of a JSON document a newline is whitespace, and within its texts there is none.
            line = None if value is None else value.replace(b"\n", b" ")
            found = TOMBSTONE_PROBLEM if line is None else parse_record(line)
            if isinstance(found, str):
                problems.add(
                    f"topic {address.topic}", Problem(found, f"partition {each.partition}, offset {message.offset()}")
                )
            elif line is not None and not problems.count:
                file.write(line + b"\n")
    if problems.count:
        raise problems.refusal(ADVICE)
    if is_empty:
        raise empty_topic_error(address)


def empty_topic_error(address: TopicAddress) -> HanzoError:
    return invalid(f"topic {address.topic} has no message between from and until: a dataset needs at least one record")


@contextmanager
def connected_topic(address: TopicAddress, security: Mapping[str, str]) -> "Iterator[TopicReader]":
    """Open a reader, and convert the library's exceptions to HanzoError."""
    found = TopicReader(address, security)
    try:
        yield found
    except KafkaException as error:
        found.poll_errors()
        raise found.unavailable_error(error.args[0].str()) from error
    finally:
        found.close()


class TopicReader:
    """Reads a topic without a consumer group: nothing is stored at the brokers."""

    def __init__(self, address: TopicAddress, security: Mapping[str, str]) -> None:
        self._address = address
        self._connection_error = ""
        options = {
            "bootstrap.servers": ",".join(address.brokers),
            "client.id": "hanzo-ml",
            "group.id": "hanzo-ml-datasets",  # the library requires one; without a subscription it is not joined
            "enable.auto.commit": False,
            "enable.partition.eof": True,  # non-messages may follow the last message: transaction markers, gaps
            "auto.offset.reset": "error",  # otherwise messages that have been deleted meanwhile would be skipped silently
            "isolation.level": "read_committed",  # without messages of aborted transactions
            "check.crcs": True,
            "queued.max.messages.kbytes": MAX_FETCH_KILOBYTES,
            "error_cb": self._note,
            "log_level": 0,  # otherwise it logs every connection attempt
            **security,
        }
        try:
            self._consumer = Consumer(options)
        except KafkaException as error:
            raise self.unavailable_error(f"the settings of stream are refused: {error.args[0].str()}") from None

    def read_watermarks(self) -> dict[int, tuple[int, int]]:
        """Return the oldest available offset and the one after the newest, by partition.

        All topics are listed, because brokers may create a topic that is requested by name.
        """
        found = self._consumer.list_topics(timeout=ANSWER_TIMEOUT_SECONDS).topics.get(self._address.topic)
        if found is None:
            message = f"there is no topic {self._address.topic} at these brokers, or none that this server may read"
            raise not_found(f"{message}: check the address")
        if found.error is not None:
            raise self.unavailable_error(found.error.str())
        return {partition: self._watermarks(partition) for partition in found.partitions}

    def _watermarks(self, partition: int) -> tuple[int, int]:
        place = TopicPartition(self._address.topic, partition)
        found = self._consumer.get_watermark_offsets(place, timeout=ANSWER_TIMEOUT_SECONDS)
        if found is None:
            raise self.unavailable_error(f"no answer about partition {partition}")
        return found

    def messages(self, wanted: OffsetRange) -> Iterator[Message]:
        """Yield the messages of a partition.

        Offsets without a message (compacted, or transaction markers) are skipped.

        Raises:
            HanzoError: 409 if messages were deleted meanwhile, 503 if the brokers do not answer.
        """
        if wanted.first == wanted.until:
            return
        self._consumer.assign([TopicPartition(self._address.topic, wanted.partition, wanted.first)])
        ended: int | None = None
        while (message := self._consumer.poll(ANSWER_TIMEOUT_SECONDS)) is not None:
            error, offset = message.error(), message.offset() or 0
            if error is None:
                if offset < wanted.until:
                    yield message
                if offset >= wanted.until - 1:
                    return
            elif error.code() == KafkaError._PARTITION_EOF:
                if offset >= wanted.until:
                    return
                ended = offset  # of a replica that lags, or an open transaction: more may follow
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise self._changed(f"offset {offset} of partition {wanted.partition} is gone")
            else:
                raise self.unavailable_error(error.str())
        if ended is not None:
            raise self._changed(f"partition {wanted.partition} ends at offset {ended}, before {wanted.until}")
        raise self.unavailable_error(f"no message for {ANSWER_TIMEOUT_SECONDS:.0f} s")

    def poll_errors(self) -> None:
        """Let the library report connection errors to `_note`.

        It does so only when messages are requested.
        """
        self._consumer.poll(0)

    def close(self) -> None:
        self._consumer.close()

    def unavailable_error(self, reason: str) -> HanzoError:
        """Return the error, with the connection errors: they say more than that no answer came."""
        place = self._address.uri
        details = " ".join("; ".join(filter(None, (self._connection_error, reason))).split())[:500]
        return HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, f"{place} cannot be read ({details}): try again, or check it")

    def _changed(self, detail: str) -> HanzoError:
        return conflict(f"topic {self._address.topic} changed while it was read ({detail}). Nothing was stored: try again")

    def _note(self, error: KafkaError) -> None:
        # That all brokers are down follows from their individual errors, and says less.
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._connection_error = error.str()
