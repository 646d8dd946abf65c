"""Checksums that a client sends with an upload: `Content-MD5` (RFC 1864) and `X-Checksum-Sha256` (hex)."""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resources.errors import invalid

SHA256_HEADER = "X-Checksum-Sha256"


@dataclass(frozen=True)
class ExpectedChecksums:
    """Checksums that the bytes must have; None where nothing was said."""

    sha256: str | None = None
    md5: bytes | None = None


class RunningChecksums:
    """The checksums of bytes on their way. MD5 only where it was promised: it halves the speed."""

    def __init__(self, promised: ExpectedChecksums) -> None:
        self._promised = promised
        self._sha256 = hashlib.sha256()
        self._md5: Any = hashlib.md5(usedforsecurity=False) if promised.md5 is not None else None
        self.size = 0

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._md5 is not None:
            self._md5.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def check(self) -> None:
        """Raises a 400 where the bytes are not the promised ones."""
        if self._promised.sha256 not in (None, self.sha256):
            raise checksum_mismatch(SHA256_HEADER)
        if self._md5 is not None and self._md5.digest() != self._promised.md5:
            raise checksum_mismatch("Content-MD5")


def checksum_mismatch(header: str) -> Exception:
    return invalid(f"What arrived is not what {header} says, and nothing was stored: send it again")


def expected_checksums(headers: Mapping[str, str]) -> ExpectedChecksums:
    """Raises a 400 for a header that no checksum can be."""
    sha256 = headers.get(SHA256_HEADER.lower())
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise invalid(f"{SHA256_HEADER} must be a SHA-256 of 64 hexadecimal digits")
    md5 = headers.get("content-md5")
    try:
        digest = None if md5 is None else base64.b64decode(md5, validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if digest is not None and len(digest) != 16:
        raise invalid("Content-MD5 must be the base64 of an MD5's 16 bytes")
    return ExpectedChecksums(sha256.lower() if sha256 else None, digest)
