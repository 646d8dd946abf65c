"""Signed links: temporary permission to download one object, issued for one organization."""

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from resources.errors import ErrorCode, HanzoError

KEY_FILE = "link-key"
KEY_BYTES = 32


@dataclass(frozen=True)
class SignedLink:
    """`expires_at` in seconds since 1970 UTC."""

    organization: str
    uri: str
    expires_at: int

    def query(self, key: bytes) -> str:
        """Return the query string of the link."""
        return urlencode({**vars(self), "signature": self._signature(key)})

    def check(self, signature: str, key: bytes, now: float) -> None:
        """Raise a 403 unless this server signed the link and it has not expired."""
        if not hmac.compare_digest(self._signature(key).encode(), signature.encode()):
            raise HanzoError(ErrorCode.PERMISSION_DENIED, "This link was not issued by this server, or was modified")
        if now > self.expires_at:
            raise HanzoError(ErrorCode.PERMISSION_DENIED, "This link has expired: ask for a new one")

    def _signature(self, key: bytes) -> str:
        # Quoted parts, so that no two links have the same text.
        text = "\n".join(repr(part) for part in (self.organization, self.uri, self.expires_at))
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def link_key(home: Path) -> bytes:
    """Return the key of servers sharing a state folder; create it if missing.

    Only their user can read it.
    """
    path = home / KEY_FILE
    if not path.exists():
        own = path.with_name(f"{KEY_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
        home.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(own, path)
        own.unlink()
    return path.read_bytes()
