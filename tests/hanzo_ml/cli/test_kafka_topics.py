"""`hanzo-ml dataset create --path kafka://...`, and `--since` to continue from a version."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from confluent_kafka import Producer

from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.dataset_upload import continue_topic
from tests.support.cli.command_line import refusal, run
from tests.support.kafka_brokers import WAIT_SECONDS, Brokers
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="module")
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture(scope="module")
def server(brokers: Brokers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start a server that may read from its brokers."""
    allowed = ",".join(f"kafka://{broker}" for broker in brokers.addresses.split(","))
    with ServerProcess(tmp_path_factory.mktemp("server"), {"HANZO_ML_STORAGE_IMPORT_FROM": allowed}) as process:
        yield process


def send(brokers: Brokers, topic: str, numbers: Sequence[int]) -> None:
    producer = Producer({"bootstrap.servers": brokers.addresses, "log_level": 2})
    for number in numbers:
        producer.produce(topic, json.dumps({"n": number}), partition=number % 2)
    assert producer.flush(WAIT_SECONDS) == 0


def create(server: ServerProcess, *more: str) -> subprocess.CompletedProcess[str]:
    return run(server.url, "dataset", "create", "--name", "clicks", *more)


def test_topic_is_read_and_continued_from_the_last_version(server: ServerProcess, brokers: Brokers, tmp_path: Path) -> None:
    address = f"kafka://{brokers.addresses}/clicks.csv"
    send(brokers, "clicks.csv", [0, 1, 2])
    assert create(server, "--path", address).stdout.startswith("clicks@1 created: 3 records")
    again = create(server, "--path", address)
    assert again.stdout.startswith("clicks@1 exists already with this content"), again.stderr
    assert "no message between from and until" in refusal(create(server, "--path", address, "--since", "clicks@1"))
    send(brokers, "clicks.csv", [3, 4])
    assert create(server, "--path", address, "--since", "clicks").stdout.startswith("clicks@2 created: 2 records")
    assert run(server.url, "dataset", "checkout", "clicks@2", "--to", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out" / "clicks.csv.jsonl").read_text() == '{"n": 4}\n{"n": 3}\n'
    lineage = run(server.url, "dataset", "lineage", "clicks@2").stdout
    assert f"↑ {address}?from=0:2,1:1,2:0,3:0&until=0:3,1:2,2:0,3:0" in lineage
    assert run(server.url, "dataset", "lineage", "clicks@2", "--json").returncode == 0


@pytest.mark.parametrize(
    ("address", "status", "message"),
    [
        ("kafka://{brokers}/none", 404, "there is no topic none"),
        ("kafka://{brokers}/hanzo.ml.audit", 403, "fetches nothing from there"),
        ("kafka://{brokers},127.0.0.1:1/clicks", 403, "fetches nothing from there"),
        ("kafka://{brokers}/clicks?offset=3", 400, "has no parameter 'offset'"),
        ("kafka://{brokers}", 400, "not an address of a Kafka topic"),
    ],
    ids=["none", "own", "other-broker", "query", "no-topic"],
)
def test_invalid_kafka_address_is_refused(
    server: ServerProcess, brokers: Brokers, address: str, status: int, message: str
) -> None:
    form = {"name": "refused", "source": address.format(brokers=brokers.addresses)}
    answer = httpx.post(f"{server.url}/v1/datasets", data=form, timeout=60, trust_env=False)
    assert answer.status_code == status and message in answer.json()["message"], answer.text


def test_since_is_refused_for_another_topic_than_that_of_the_version() -> None:
    version = {"name": "d", "version": 3, "lineage": {"origins": ["kafka://a:9092/t?from=0:1,1:0&until=0:5,1:2"]}}
    assert continue_topic("kafka://b/t", version) == "kafka://b/t?from=0:5,1:2"
    assert continue_topic("kafka://b/t/?tombstones=skip", version) == "kafka://b/t/?from=0:5,1:2&tombstones=skip"
    for address, message in (
        ("kafka://a/u", "d@3 was not made from the topic 'u'"),
        ("kafka://a/t?from=0:1", "without from="),
        ("s3://t", "--since needs --path kafka"),
        ("None", "--since needs --path kafka"),
    ):
        with pytest.raises(Refused, match=message):
            continue_topic(address, version)
    with pytest.raises(Refused, match="was not made from the topic"):
        continue_topic("kafka://a/t", version | {"lineage": {}})
