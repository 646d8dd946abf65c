"""Verify bearer tokens (JWT) with the sign-in server's public keys (JWKS)."""

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

from api.auth.permissions import ROLES, Caller
from recipes.contracts.frozen_model import UNSTORABLE_CHARACTERS
from resources.errors import ErrorCode, HanzoError
from resources.metadata.field_rules import MAX_USER
from resources.settings.sections import Auth

# Public signing keys of the sign-in server, fetched from its JWKS and cached; an unknown key id fetches them again.

log = logging.getLogger(__name__)

JWKS_PATH = "/.well-known/jwks.json"
TIMEOUT_SECONDS = 5.0
MAX_BYTES = 1 << 20
MIN_RSA_BITS = 2048
FETCH_ERRORS = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Exceptions of fetching and parsing keys from an address that does not respond or has no JWKS."""
ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
"""Type and curve of a key -> the only algorithm that it may verify. The token's `alg` never decides, so that a public key
cannot be used as an HMAC secret."""


@dataclass(frozen=True)
class VerifyingKey:
    kid: str
    algorithm: str
    key: jwt.PyJWK


def verifying_keys(document: Any) -> dict[str, VerifyingKey]:
    """Return the usable keys of a JWKS by `kid`; others (purpose, type, length) are skipped."""
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
    """The keys of one sign-in server. Fetches run in a thread, limited by a timeout."""

    def __init__(self, auth: Auth, clock: Callable[[], float] = time.monotonic) -> None:
        self._auth = auth
        self._clock = clock
        self._keys: dict[str, VerifyingKey] = {}
        self._fetched_at = float("-inf")
        self._attempted_at = float("-inf")
        self._lock = asyncio.Lock()
        self._refresh: asyncio.Task[None] | None = None

    def is_known(self, kid: str) -> bool:
        """Return whether a key is still accepted."""
        return kid in self._keys and self._clock() - self._fetched_at <= self._auth.keys_limit_seconds

    async def get(self, kid: str) -> VerifyingKey | None:
        """Return the key of an id; None if the sign-in server has none.

        Raises:
            HanzoError: 503 without any keys: the sign-in server is unreachable, or was for too long.
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
        """Fetch the keys, at most once per interval.

        Neither forged key ids nor an outage can flood the sign-in server with requests.
        """
        async with self._lock:
            if self._clock() - self._attempted_at < self._auth.keys_retry_seconds:
                return
            self._attempted_at = self._clock()
            try:
                keys = await asyncio.to_thread(fetch_keys, self._auth.issuer + JWKS_PATH)
            except FETCH_ERRORS as error:
                log.warning(
                    "the sign-in server's keys cannot be fetched, the cached ones are kept: %s", type(error).__name__
                )
                return
            self._keys, self._fetched_at = keys, self._clock()


def fetch_keys(url: str) -> dict[str, VerifyingKey]:
    """Fetch the keys once; a redirect fails, because it would let another host choose them."""
    with httpx.stream("GET", url, timeout=TIMEOUT_SECONDS, follow_redirects=False) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        body = b""
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > MAX_BYTES:
                raise ValueError("too long")
    return verifying_keys(json.loads(body))


# Verify bearer tokens (JWT): signature, audience and times, then organization and role.
#
# No message and no log line of this module contains a token or a part of one.

MAX_TOKEN_LENGTH = 16_384
MAX_CACHED = 2048
REQUIRED_CLAIMS = ["exp", "iss", "aud"]


class Tokens:
    """Verifies tokens, and caches them until they expire or their key is withdrawn."""

    def __init__(self, auth: Auth, keys: SigningKeys) -> None:
        self._auth = auth
        self._keys = keys
        self._verified: dict[str, tuple[Caller, str, float]] = {}

    async def caller(self, authorization: str | None) -> Caller:
        """Return the caller of a request with this `Authorization` header.

        Raises:
            HanzoError: 401 if the token is invalid, 403 if it has no role here, 503 if it cannot be checked.
        """
        token = bearer_token(authorization)
        remembered = self._verified.get(token)
        if remembered is not None:
            caller, kid, expires = remembered
            if time.time() < expires and self._keys.is_known(kid):
                return caller
            del self._verified[token]
        kid = key_id(token)
        key = await self._keys.get(kid)
        if key is None:
            raise unauthenticated("it is signed by a key that the sign-in server does not have")
        claims = verified_claims(token, key, self._auth)
        caller = caller_from_claims(claims, self._auth)
        if len(self._verified) >= MAX_CACHED:
            self._verified.clear()
        self._verified[token] = (caller, kid, float(claims["exp"]) + self._auth.leeway_seconds)
        return caller


def bearer_token(authorization: str | None) -> str:
    """Return the token of a header."""
    if authorization is None:
        message = "Sign in: send your token as 'Authorization: Bearer TOKEN' (MLflow's clients: set MLFLOW_TRACKING_TOKEN)"
        raise HanzoError(ErrorCode.UNAUTHENTICATED, message)
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise unauthenticated("send it as 'Authorization: Bearer TOKEN'")
    if len(token) > MAX_TOKEN_LENGTH:
        raise unauthenticated("it is too long")
    return token.strip()


def key_id(token: str) -> str:
    """Return the `kid` of a token that is not verified yet."""
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        raise unauthenticated("it is not a JSON web token") from None
    kid = header.get("kid")
    if not isinstance(kid, str) or not kid:
        raise unauthenticated("it does not name its key (kid)")
    if "crit" in header:
        raise unauthenticated("it requires an extension that this server does not support (crit)")
    return kid


def verified_claims(token: str, key: VerifyingKey, auth: Auth) -> Mapping[str, Any]:
    """Return the claims after checking signature, algorithm, issuer, audience and times."""
    try:
        return jwt.decode(
            token,
            key.key,
            algorithms=[key.algorithm],
            audience=auth.audience,
            issuer=[auth.issuer, auth.issuer + "/"],
            leeway=auth.leeway_seconds,
            options={"require": REQUIRED_CLAIMS},
        )
    except jwt.ExpiredSignatureError:
        raise unauthenticated("it has expired: sign in again") from None
    except jwt.ImmatureSignatureError:
        raise unauthenticated("it is not valid yet: compare the clocks of both servers") from None
    except jwt.InvalidAudienceError:
        raise unauthenticated("it was issued for another service (aud)") from None
    except jwt.InvalidIssuerError:
        raise unauthenticated("it was issued by another sign-in server (iss)") from None
    except jwt.MissingRequiredClaimError as error:
        raise unauthenticated(f"it lacks the claim {error.claim}") from None
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
        raise unauthenticated("its signature or its format is invalid") from None


def caller_from_claims(claims: Mapping[str, Any], auth: Auth) -> Caller:
    """Return the caller that the claims name; unknown roles are ignored."""
    user, organization = claims.get(auth.user_claim), claims.get(auth.organization_claim)
    for claim, value in ((auth.user_claim, user), (auth.organization_claim, organization)):
        if not isinstance(value, str) or not 0 < len(value) <= MAX_USER or UNSTORABLE_CHARACTERS.search(value):
            raise unauthenticated(f"its claim {claim} is missing or not a valid name")
    given = claims.get(auth.roles_claim, ())
    names = given.split() if isinstance(given, str) else given if isinstance(given, list) else ()
    roles = frozenset(name for name in names if isinstance(name, str) and name in ROLES)
    if not roles:
        message = f"Your token gives you no role here: ask for one of {', '.join(ROLES)} (claim {auth.roles_claim})"
        raise HanzoError(ErrorCode.PERMISSION_DENIED, message)
    return Caller(user_id=str(user), organization=str(organization), roles=roles)


def unauthenticated(why: str) -> HanzoError:
    return HanzoError(ErrorCode.UNAUTHENTICATED, f"The token is refused: {why}")
