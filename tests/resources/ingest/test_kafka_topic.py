"""Versions of a Kafka topic: snapshots between offsets, with messages exactly as sent."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer

from recipes.contracts.dataset_formats import Format
from recipes.contracts.job import BadConfiguration
from resources.errors import ErrorCode, HanzoError
from resources.ingest.kafka_address import is_topic_allowed, parse_topic_address, resolve_ranges
from resources.ingest.new_version import NewVersion
from resources.ingest.remote_sources import allowed_files, list_files
from resources.ingest.version_creation import create_from_files
from resources.metadata.datasets import DatasetVersion
from resources.settings.settings import Settings
from tests.support.kafka_brokers import WAIT_SECONDS, Brokers, brokers
from tests.support.resources.dataset_versions import Place
from tests.support.server_process import free_port

__all__ = ["brokers"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def settings(home: Path, **variables: str) -> Settings:
    return Settings.load({"HANZO_ML_HOME": str(home), **variables})


def send(brokers: Brokers, values: Sequence[tuple[int, bytes | None]], topic: str = "orders") -> None:
    """Send values to partitions, in order."""
    producer = Producer({"bootstrap.servers": brokers.addresses, "log_level": 2})
    for partition, value in values:
        producer.produce(topic, value, key="k", partition=partition)
    assert producer.flush(WAIT_SECONDS) == 0


def version_of(place: Place, home: Path, address: str, name: str = "orders") -> tuple[DatasetVersion, bool]:
    files = list_files(settings(home), address, Format.JSONL)
    return create_from_files(place.database, place.store, NewVersion(name, "jsonl", "u", "default"), files)


def source_of(place: Place, version: DatasetVersion) -> bytes:
    return (place.source(version) / "orders.jsonl").read_bytes()


@pytest.mark.requirement("B11", "B12")
def test_version_holds_a_snapshot_of_the_topic_and_the_next_continues_from_it(
    place: Place, brokers: Brokers, tmp_path: Path
) -> None:
    send(brokers, [(2, b'{"n": 3}'), (0, b'{"n":  1}'), (0, b'{\n "n": 2}')])
    address = f"kafka://{brokers.addresses}/orders"
    files = list_files(settings(tmp_path), address, Format.JSONL)
    send(brokers, [(0, b'{"n": 4}')])  # after the version's timestamp
    first, is_new = create_from_files(place.database, place.store, NewVersion("orders", "jsonl", "u", "default"), files)
    assert is_new and first.num_records == 3
    assert source_of(place, first) == b'{"n":  1}\n{  "n": 2}\n{"n": 3}\n'
    [pinned] = first.lineage["origins"]
    assert pinned == f"{address}?from=0:0,1:0,2:0,3:0&until=0:2,1:0,2:1,3:0"
    assert version_of(place, tmp_path, pinned) == (first, False)
    second, is_new = version_of(place, tmp_path, f"{address}?{pinned.partition('&')[2].replace('until', 'from')}")
    assert is_new and source_of(place, second) == b'{"n": 4}\n'
    with pytest.raises(HanzoError, match="no message between from and until"):
        version_of(place, tmp_path, f"{address}?from=0:3,2:1")


def test_invalid_messages_are_named_and_no_version_is_stored(place: Place, brokers: Brokers, tmp_path: Path) -> None:
    values = [b'{"n": 1}', b"plain", b'[{"n": 1}]', None, b'{"n": 1, "n": 2}', b""]
    send(brokers, [(1, value) for value in values])
    address = f"kafka://{brokers.addresses}/orders"
    with pytest.raises(HanzoError) as caught:
        version_of(place, tmp_path, address)
    assert caught.value.code is ErrorCode.INVALID_PARAMETER_VALUE
    assert "topic orders, partition 1, offset 1: not JSON" in caught.value.message
    assert "partition 1, offset 2: not a JSON object" in caught.value.message
    assert "partition 1, offset 3: has no value (a tombstone)" in caught.value.message
    assert "(and 2 more). Nothing was stored: read around it with from=" in caught.value.message
    for skipped, message in (("from=1:4", "offset 4: repeated key 'n'"), ("from=1:5", "offset 5: not JSON")):
        with pytest.raises(HanzoError, match=message):
            version_of(place, tmp_path, f"{address}?{skipped}")
    assert place.store.list("s3://hanzo-ml/datasets") == []


def test_tombstones_are_skipped_on_request(place: Place, brokers: Brokers, tmp_path: Path) -> None:
    send(brokers, [(0, None), (0, b'{"n": 1}'), (0, None)])
    made, _ = version_of(place, tmp_path, f"kafka://{brokers.addresses}/orders?tombstones=skip")
    assert source_of(place, made) == b'{"n": 1}\n'
    assert version_of(place, tmp_path, made.lineage["origins"][0]) == (made, False)
    with pytest.raises(HanzoError, match="no message between"):
        version_of(place, tmp_path, f"kafka://{brokers.addresses}/orders?tombstones=skip&from=0:2")


def test_expired_messages_are_refused_and_memory_stays_flat(place: Place, brokers: Brokers, tmp_path: Path) -> None:
    """These brokers retain 5 MB per partition."""
    value = b'{"text": "' + b"x" * 200_000 + b'"}'
    send(brokers, [(0, value)] * 10)
    address = f"kafka://{brokers.addresses}/orders"
    early = list_files(settings(tmp_path), f"{address}?until=0:10", Format.JSONL)
    send(brokers, [(0, value)] * 40)
    with pytest.raises(HanzoError, match="changed while it was read") as caught:
        create_from_files(place.database, place.store, NewVersion("orders", "jsonl", "u", "default"), early)
    assert caught.value.code is ErrorCode.RESOURCE_CONFLICT
    with pytest.raises(HanzoError, match=r"offsets 0 to \d+ of partition 0 .* are gone: .* Begin there \(from=0:\d+\)"):
        version_of(place, tmp_path, f"{address}?from=0:0")
    [oldest] = list_files(settings(tmp_path), address, Format.JSONL)
    tracemalloc.start()
    with oldest.open() as file:
        assert file.seek(0, 2) > 20 * len(value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(value)


def test_missing_topic_partition_or_offset_is_named(
    brokers: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(brokers, [(0, b'{"n": 1}')])
    there = f"kafka://{brokers.addresses}"
    for address, message in (
        (f"{there}/none", "there is no topic none"),
        (f"{there}/orders?from=7:0", "no partition 7"),
        (f"{there}/orders?from=0:2", "ends at offset 1, and 2 is not there yet"),
        (f"{there}/orders?from=0:1&until=0:0", "until 0 is before from 1"),
    ):
        with pytest.raises(HanzoError, match=message):
            list_files(settings(tmp_path), address, Format.JSONL)
    with pytest.raises(HanzoError, match="there is no topic none"):
        list_files(settings(tmp_path), f"{there}/none", Format.JSONL)  # the lookup has not created it
    with pytest.raises(HanzoError, match="read as jsonl, and not as csv"):
        list_files(settings(tmp_path), f"{there}/orders", Format.CSV)
    monkeypatch.setattr("resources.ingest.kafka_topic.ANSWER_TIMEOUT_SECONDS", 0.5)
    with pytest.raises(HanzoError, match="Connection refused") as caught:
        list_files(settings(tmp_path), f"kafka://127.0.0.1:{free_port()}/orders", Format.JSONL)
    assert caught.value.code is ErrorCode.TEMPORARILY_UNAVAILABLE


def test_password_is_sent_with_the_configured_protocol_and_never_shown(brokers: Brokers, tmp_path: Path) -> None:
    """Brokers without SASL close the connection; without the configured protocol they would have answered."""
    signed = settings(
        tmp_path,
        HANZO_ML_STREAM_SECURITY_PROTOCOL="SASL_PLAINTEXT",
        HANZO_ML_STREAM_SASL_USERNAME="ann",
        HANZO_ML_STREAM_SASL_PASSWORD="canary",
    )
    assert "canary" not in json.dumps(signed.masked())
    send(brokers, [(0, b'{"n": 1}')])
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr("resources.ingest.kafka_topic.ANSWER_TIMEOUT_SECONDS", 0.5)
        with pytest.raises(HanzoError) as caught:
            list_files(signed, f"kafka://{brokers.addresses}/orders", Format.JSONL)
    assert caught.value.code is ErrorCode.TEMPORARILY_UNAVAILABLE and "canary" not in caught.value.message
    nowhere = settings(tmp_path, HANZO_ML_STREAM_SECURITY_PROTOCOL="SSL", HANZO_ML_STREAM_CA_FILE="/nowhere.pem")
    with pytest.raises(HanzoError, match=r"settings of stream are refused: .*ssl\.ca\.location"):
        list_files(nowhere, f"kafka://{brokers.addresses}/orders", Format.JSONL)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SECURITY_PROTOCOL": "SASL_SSL", "SASL_USERNAME": "ann"}, "needs sasl_username and sasl_password"),
        ({"SASL_USERNAME": "ann", "SASL_PASSWORD": "canary"}, "needs sasl_username and sasl_password, no other does"),
        ({"CA_FILE": "/ca.pem"}, "ca_file needs security_protocol"),
        ({"SECURITY_PROTOCOL": "TLS"}, "security_protocol"),
    ],
    ids=["half", "unused", "unused-file", "unknown"],
)
def test_incomplete_security_settings_of_the_stream_are_refused(
    tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    with pytest.raises(BadConfiguration, match=message) as caught:
        settings(tmp_path, **{f"HANZO_ML_STREAM_{name}": value for name, value in variables.items()})
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "kafka://evil:9092/orders",
        "kafka://a:9092,evil:9092/orders",
        "kafka://b:9092/other",
        "kafka://a:9093/orders",
        "kafka://a:9092/hanzo.ml.audit",
        "kafka://a/hanzo.ml.jobs",
        "kafka://a@evil:9092/orders",
        "kafka://evil:9092/orders?brokers=a:9092",
        "kafka://a:9092/orders/../hanzo.ml.audit",
        "kafka://a:9092",
        "kafka:///orders",
        "kafka://[::1/orders",
    ],
)
def test_broker_outside_the_allow_list_is_refused_over_http(tmp_path: Path, address: str) -> None:
    """The stack's own topics, which hold all organizations' data, are refused as well.

    `evil` does not resolve, so the refusal proves that no connection was attempted.
    """
    allowed = settings(tmp_path, HANZO_ML_STORAGE_IMPORT_FROM="kafka://A,kafka://b:9092/orders,s3://x")
    with pytest.raises(HanzoError) as caught:
        allowed_files(allowed, address, Format.JSONL)
    assert caught.value.code in (ErrorCode.PERMISSION_DENIED, ErrorCode.INVALID_PARAMETER_VALUE)


@pytest.mark.parametrize("address", ["kafka://a/any", "kafka://A:9092,b/orders", "kafka://b:9092/orders/?from=0:1"])
def test_allowed_broker_covers_all_topics_and_allowed_topic_only_itself(tmp_path: Path, address: str) -> None:
    assert is_topic_allowed(parse_topic_address(address), ("kafka://a:9092", "kafka://c,b/orders"))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("from=5", "PARTITION:OFFSET"),
        ("from=0:-1", "PARTITION:OFFSET"),
        ("until=0:1,0:2", "names a partition twice"),
        ("from=0:1&from=0:2", "has a parameter twice"),
        ("since=0:1", "has no parameter 'since'"),
        ("tombstones=keep", "can only be skip"),
        ("from", "not an address of a Kafka topic"),
    ],
)
def test_invalid_query_of_a_topic_address_is_refused(query: str, message: str) -> None:
    with pytest.raises(HanzoError, match=message):
        parse_topic_address(f"kafka://a/orders?{query}")


def test_partitions_that_until_does_not_name_are_not_read() -> None:
    """Otherwise a version's stored address would change its meaning once the topic gains a partition."""
    kept = {0: (0, 9), 1: (4, 4), 2: (0, 5)}
    found = resolve_ranges(parse_topic_address("kafka://a/orders?from=0:3,1:0&until=0:7,1:0"), kept)
    assert [(each.partition, each.first, each.until) for each in found] == [(0, 3, 7), (1, 0, 0)]
