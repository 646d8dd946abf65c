"""Addresses of Kafka messages: `kafka://BROKER,BROKER/TOPIC?from=0:12,1:40&until=0:20,1:55`, by partition.

This module parses addresses; it does not connect to brokers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from resources.errors import invalid

KAFKA_SCHEME = "kafka://"
DEFAULT_PORT = 9092
BROKER_PATTERN = re.compile(r"[A-Za-z0-9_.-]+(:\d{1,5})?")
TOPIC_PATTERN = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
"""The pattern for topic names that Kafka allows."""
OFFSETS_PATTERN = re.compile(r"\d{1,9}:\d{1,18}(,\d{1,9}:\d{1,18})*")
FORM_HINT = "write kafka://BROKER:9092/TOPIC, several brokers with commas between them"


@dataclass(frozen=True)
class OffsetRange:
    """Offsets of a partition from `first` up to, but not including, `until`."""

    partition: int
    first: int
    until: int


@dataclass(frozen=True)
class TopicAddress:
    """A parsed address; `first` and `until` are by partition.

    If `until` is given, only its partitions are read.
    """

    brokers: tuple[str, ...]
    topic: str
    first: Mapping[int, int]
    until: Mapping[int, int] | None
    skips_tombstones: bool

    @property
    def uri(self) -> str:
        return f"{KAFKA_SCHEME}{','.join(self.brokers)}/{self.topic}"

    def pinned_address(self, ranges: Sequence[OffsetRange]) -> str:
        """Return the address of exactly these messages.

        It stays valid as long as Kafka keeps them.
        """
        first = format_offsets((each.partition, each.first) for each in ranges)
        until = format_offsets((each.partition, each.until) for each in ranges)
        return f"{self.uri}?from={first}&until={until}{'&tombstones=skip' if self.skips_tombstones else ''}"


def parse_topic_address(address: str) -> TopicAddress:
    """Parse the address of a topic. Raises HanzoError: 400 if it is not one."""
    try:
        parts = urlsplit(address)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise invalid(f"{address[:200]!r} is not an address of a Kafka topic: {FORM_HINT}") from None
    brokers = parts.netloc.split(",")
    topic = parts.path.removeprefix("/").removesuffix("/")
    if (
        parts.fragment
        or not all(BROKER_PATTERN.fullmatch(broker) for broker in brokers)
        or not TOPIC_PATTERN.fullmatch(topic)
    ):
        raise invalid(f"{address[:200]!r} is not an address of a Kafka topic: {FORM_HINT}")
    parameters = dict(query)
    if unknown := sorted(parameters.keys() - {"from", "until", "tombstones"}):
        raise invalid(f"a topic's address has no parameter '{unknown[0][:100]}': use from, until and tombstones")
    if len(parameters) < len(query):
        raise invalid("a topic's address has a parameter twice: give from, until and tombstones once each")
    if parameters.get("tombstones", "skip") != "skip":
        raise invalid("tombstones of a topic's address can only be skip: leave it out to refuse messages without a value")
    return TopicAddress(
        brokers=tuple(dict.fromkeys(add_port(broker) for broker in brokers)),
        topic=topic,
        first=parse_offsets("from", parameters["from"]) if "from" in parameters else {},
        until=parse_offsets("until", parameters["until"]) if "until" in parameters else None,
        skips_tombstones="tombstones" in parameters,
    )


def add_port(broker: str) -> str:
    return broker.lower() if ":" in broker else f"{broker.lower()}:{DEFAULT_PORT}"


def parse_offsets(name: str, text: str) -> dict[int, int]:
    if not OFFSETS_PATTERN.fullmatch(text):
        raise invalid(
            f"{name} of a topic's address is PARTITION:OFFSET, several with commas between them, such as 0:12,1:40"
        )
    pairs = [pair.split(":") for pair in text.split(",")]
    found = {int(partition): int(offset) for partition, offset in pairs}
    if len(found) < len(pairs):
        raise invalid(f"{name} of a topic's address names a partition twice: give one offset for each")
    return found


def format_offsets(offsets: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{partition}:{offset}" for partition, offset in offsets)


def is_topic_allowed(address: TopicAddress, allowed: Sequence[str]) -> bool:
    """Return whether every broker of an address is allowed for its topic.

    `kafka://BROKER` allows all its topics. Otherwise, an address could make the server connect to a broker that is not
    allowed.
    """
    return all(any(allows_broker(each, broker, address.topic) for each in allowed) for broker in address.brokers)


def allows_broker(allowed: str, broker: str, topic: str) -> bool:
    if not allowed.startswith(KAFKA_SCHEME):
        return False
    brokers, _, granted = allowed.removeprefix(KAFKA_SCHEME).rstrip("/").partition("/")
    return broker in map(add_port, brokers.split(",")) and granted in ("", topic)


def resolve_ranges(address: TopicAddress, kept: Mapping[int, tuple[int, int]]) -> list[OffsetRange]:
    """Return the offsets of an address.

    `kept` has the first offset of each partition, and the one after the last.

    Raises:
        HanzoError: 400 if the address names offsets that do not exist, or no longer.
    """
    found = []
    for partition in sorted({*address.first, *(kept if address.until is None else address.until)}):
        if partition not in kept:
            raise invalid(f"topic {address.topic} has no partition {partition}: correct from and until")
        low, high = kept[partition]
        first = address.first.get(partition, low)
        until = high if address.until is None else address.until.get(partition, first)
        if first < low and first < until:
            raise invalid(
                f"offsets {first} to {low - 1} of partition {partition} of topic {address.topic} are gone: Kafka keeps no "
                f"message before {low}. Begin there (from={partition}:{low}), and so without them"
            )
        if max(first, until) > high:
            raise invalid(
                f"partition {partition} of topic {address.topic} ends at offset {high}, and {max(first, until)} is not "
                "there yet: wait, or correct from and until. A topic that was deleted and created again counts from 0"
            )
        if until < first:
            raise invalid(f"partition {partition}: until {until} is before from {first}: correct them")
        found.append(OffsetRange(partition, first, until))
    return found
