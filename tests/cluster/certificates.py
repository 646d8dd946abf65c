"""The cluster's own certificate authority, and certificates of its programs and users."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=30)


class Authority:
    """Signs certificates into a folder as `NAME.crt` and `NAME.key`."""

    def __init__(self, folder: Path) -> None:
        """Load the authority of a folder, or create one."""
        self.folder = folder
        if not (folder / "ca.crt").exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._make()
        self._certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key

    def _make(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = subject("hanzo-ml-test-cluster")
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        certificate = (
            builder(name, name, key.public_key())
            .add_extension(constraints, critical=True)
            .add_extension(key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        write_key(self.folder / "ca.key", key)
        (self.folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, file_name: str, common_name: str, group: str | None = None, hosts: tuple[str, ...] = ()) -> None:
        """Issue a certificate for servers and clients.

        Kubernetes takes the common name as the user, and `group` as its group.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        request = builder(subject(common_name, group), self._certificate.subject, key.public_key())
        request = request.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        request = request.add_extension(key_usage(signs_certificates=False), critical=True)
        request = request.add_extension(uses, critical=False)
        if hosts:
            request = request.add_extension(
                x509.SubjectAlternativeName([general_name(host) for host in hosts]), critical=False
            )
        certificate = request.sign(self._key, hashes.SHA256())
        write_key(self.folder / f"{file_name}.key", key)
        (self.folder / f"{file_name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue_key_pair(self, file_name: str) -> None:
        """Issue `NAME.key` and `NAME.pub`, which sign and check the tokens of service accounts."""
        key = ec.generate_private_key(ec.SECP256R1())
        write_key(self.folder / f"{file_name}.key", key)
        public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        (self.folder / f"{file_name}.pub").write_bytes(public)


def subject(common_name: str, group: str | None = None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if group:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(attributes)


def builder(owner: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(owner)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + VALID)
    )


def key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
