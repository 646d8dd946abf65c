"""Public signing keys of the sign-in server: fetched from its JWKS, cached, fetched again for an unknown key id.

What belongs here: which keys may verify, and for how long. What does not: what a token says (`tokens`).
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from resources.errors import ErrorCode, HanzoError
from resources.settings.sections import Auth

log = logging.getLogger(__name__)

JWKS_PATH = "/.well-known/jwks.json"
TIMEOUT_SECONDS = 5.0
MAX_BYTES = 1 << 20
MIN_RSA_BITS = 2048
FETCH_ERRORS = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What an address that answers nothing, or no JWKS, raises on the way to its keys."""
ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
"""Type and curve of a key -> the one algorithm that it verifies. The token's own choice never counts, so that no public key
is ever taken for the secret of an HMAC."""


@dataclass(frozen=True)
class VerifyingKey:
    kid: str
    algorithm: str
    key: jwt.PyJWK


def verifying_keys(document: Any) -> dict[str, VerifyingKey]:
    """The usable keys of a JWKS by their `kid`. Keys for other purposes, of other types or too short are left out."""
    keys: dict[str, VerifyingKey] = {}
    for entry in document["keys"]:
        if (key := verifying_key(entry)) is not None:
            keys[key.kid] = key
    return keys


def verifying_key(entry: Mapping[str, Any]) -> VerifyingKey | None:
    kid, kind = entry.get("kid"), entry.get("kty")
    algorithm = ALGORITHMS.get((kind, None if kind == "RSA" else entry.get("crv"))) if isinstance(kind, str) else None
    if algorithm is None or not isinstance(kid, str) or entry.get("use", "sig") != "sig":
        return None
    if entry.get("alg", algorithm) != algorithm:
        return None
    try:
        key = jwt.PyJWK.from_dict(dict(entry), algorithm)
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS:
        return None
    return VerifyingKey(kid, algorithm, key)


class SigningKeys:
    """The keys of one IAM. All waiting is on the network, in a thread, and never longer than its timeout."""

    def __init__(self, auth: Auth, clock: Callable[[], float] = time.monotonic) -> None:
        self._auth = auth
        self._clock = clock
        self._keys: dict[str, VerifyingKey] = {}
        self._fetched_at = float("-inf")
        self._attempted_at = float("-inf")
        self._lock = asyncio.Lock()
        self._refresh: asyncio.Task[None] | None = None

    def is_known(self, kid: str) -> bool:
        """Whether a key is still among those that verify."""
        return kid in self._keys and self._clock() - self._fetched_at <= self._auth.keys_limit_seconds

    async def get(self, kid: str) -> VerifyingKey | None:
        """The key of that name; None where the IAM has none.

        Raises:
            HanzoError: 503 while there are no keys at all: the IAM cannot be reached, or was not for too long.
        """
        if self.is_known(kid):
            if self._clock() - self._fetched_at > self._auth.keys_refresh_seconds:
                self._refresh_in_background()
            return self._keys[kid]
        await self._fetch()
        if self.is_known(kid):
            return self._keys[kid]
        if self._clock() - self._fetched_at > self._auth.keys_limit_seconds:
            message = "The sign-in server does not answer, so no token can be checked: try again later"
            raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, message)
        return None

    def _refresh_in_background(self) -> None:
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._fetch())

    async def _fetch(self) -> None:
        """Ask the IAM, unless it was asked just now: neither forged key names nor its failure make a flood of requests."""
        async with self._lock:
            if self._clock() - self._attempted_at < self._auth.keys_retry_seconds:
                return
            self._attempted_at = self._clock()
            try:
                keys = await asyncio.to_thread(fetch_keys, self._auth.issuer + JWKS_PATH)
            except FETCH_ERRORS as error:
                log.warning("the keys of the IAM cannot be read, the old ones stay: %s", type(error).__name__)
                return
            self._keys, self._fetched_at = keys, self._clock()


def fetch_keys(url: str) -> dict[str, VerifyingKey]:
    """One request; a redirect is a failure, because it would let another host say who may sign."""
    with httpx.stream("GET", url, timeout=TIMEOUT_SECONDS, follow_redirects=False) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        body = b""
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > MAX_BYTES:
                raise ValueError("too long")
    return verifying_keys(json.loads(body))
