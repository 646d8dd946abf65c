"""S3 server errors, refused or unreachable: the message names cause and setting."""

import datetime
import socket
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreRefuses, StoreUnavailable
from tests.support.recipes.http_responses import answering
from tests.support.s3_server import BUCKETS, VARIABLES

URI = "s3://hanzo-ml/datasets/d/1"
KEYS = "(settings storage.access_key, storage.secret_key)"


def refusal(url: str) -> tuple[type[StoreUnavailable], str]:
    """Return the error that both a put and a listing raise."""
    store = Store(StoreAddress(root=url, buckets=BUCKETS), VARIABLES)
    with pytest.raises(StoreUnavailable) as put:
        store.put_bytes(URI, b"x")
    with pytest.raises(StoreUnavailable) as listed:
        store.list(URI)
    assert (put.type, str(put.value)) == (listed.type, str(listed.value))
    return put.type, str(put.value)


@pytest.mark.parametrize(
    ("status", "code", "message", "expected"),
    [
        (403, "InvalidAccessKeyId", "No such key.", "refuses what the keys are used for, with 403 Forbidden: {} " + KEYS),
        (404, "NoSuchBucket", "None.", "has no bucket hanzo-ml-datasets (settings storage.buckets, storage.endpoint)"),
        (400, "InvalidRequest", "No.", "answers 400 Bad Request: {}"),
        pytest.param(503, "SlowDown", "Slow.", "answers 503 Service Unavailable: {}", marks=pytest.mark.slow),
    ],
)
def test_server_error_message_is_reported(status: int, code: str, message: str, expected: str) -> None:
    """Regression: the message was cut off where the server's own text begins."""
    with answering(status, code, message) as url:
        kind, said = refusal(url)
        assert said == f"{URI}: {url} {expected.format(f'{code}: {message}')}"
        assert kind is (StoreRefuses if status in (403, 404) else StoreUnavailable), "what another day may change nothing of"


def test_missing_file_is_none_without_list_permission() -> None:
    """Only a listing can show whether the bucket exists."""
    with answering(403, "AccessDenied", "No listing.", head=404) as url:
        assert Store(StoreAddress(root=url, buckets=BUCKETS), VARIABLES).find(URI) is None


@pytest.mark.slow
def test_unreachable_server_is_reported_with_its_address() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert refusal(url) == (
            StoreUnavailable,
            f"{URI}: {url} does not answer: Connection refused (setting storage.endpoint)",
        )


@pytest.mark.slow
def test_untrusted_certificate_is_distinguished_from_an_outage(tmp_path: Path) -> None:
    with answering(503, "SlowDown", "Slow.", self_signed(tmp_path / "server.pem")) as url:
        message = refusal(url)[1]
    assert message.startswith(f"{URI}: the certificate of {url} is not trusted: ") and "SSL_CERT_FILE" in message


def self_signed(file: Path) -> Path:
    """Write a self-signed certificate for this machine, with its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file
