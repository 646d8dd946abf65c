"""Kafka for the tests: librdkafka's mock brokers, reachable over TCP from any local process."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class Received:
    topic: str
    key: str
    value: dict[str, Any]


class Brokers:
    def __init__(self) -> None:
        # The brokers live as long as the client that created them.
        self._owner = Producer({"bootstrap.servers": "unused:1", "test.mock.num.brokers": 2, "log_level": 2})
        found = self._owner.list_topics(timeout=WAIT_SECONDS).brokers.values()
        self.addresses = ",".join(f"{broker.host}:{broker.port}" for broker in found)

    def received(self, *topics: str) -> list[Received]:
        """Return all messages, those of each partition in order."""
        consumer = Consumer({"bootstrap.servers": self.addresses, "group.id": "test", "log_level": 2})
        messages = []
        for topic in topics:
            for partition in consumer.list_topics(topic, timeout=WAIT_SECONDS).topics[topic].partitions:
                place = TopicPartition(topic, partition, 0)
                first, end = consumer.get_watermark_offsets(place, timeout=WAIT_SECONDS)
                consumer.assign([place])
                while first < end:
                    message = consumer.poll(WAIT_SECONDS)
                    assert message is not None and message.error() is None, message and message.error()
                    first = message.offset() + 1
                    messages.append(Received(topic, message.key().decode(), json.loads(message.value())))
        consumer.close()
        return messages


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    yield Brokers()
