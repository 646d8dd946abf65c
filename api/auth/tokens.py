"""Verify bearer tokens (JWT): signed by the sign-in server, for this service, now; with organization and role (row W1).

No message and no log line of this module holds a token or a part of one.
"""

import time
from collections.abc import Mapping
from typing import Any

import jwt

from api.auth.jwks import SigningKeys, VerifyingKey
from api.auth.permissions import ROLES, Caller
from recipes.contracts.frozen_model import UNSTORABLE_CHARACTERS
from resources.errors import ErrorCode, HanzoError
from resources.metadata.field_rules import MAX_USER
from resources.settings.sections import Auth

MAX_TOKEN_LENGTH = 16_384
MAX_CACHED = 2048
REQUIRED_CLAIMS = ["exp", "iss", "aud"]


class Tokens:
    """Verifies tokens, and remembers those that it verified until they expire or their key is withdrawn."""

    def __init__(self, auth: Auth, keys: SigningKeys) -> None:
        self._auth = auth
        self._keys = keys
        self._verified: dict[str, tuple[Caller, str, float]] = {}

    async def caller(self, authorization: str | None) -> Caller:
        """The caller of a request with this `Authorization` header.

        Raises:
            HanzoError: 401 where the token proves nothing, 403 where it has no role here, 503 where it can't be checked.
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
    """The token of a header."""
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
    """The `kid` of a token, which nobody has verified yet."""
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        raise unauthenticated("it is no JSON web token") from None
    kid = header.get("kid")
    if not isinstance(kid, str) or not kid:
        raise unauthenticated("it does not name its key (kid)")
    if "crit" in header:
        raise unauthenticated("it asks for an extension that this server does not know (crit)")
    return kid


def verified_claims(token: str, key: VerifyingKey, auth: Auth) -> Mapping[str, Any]:
    """The claims, after signature, algorithm, issuer, audience and times were checked."""
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
        raise unauthenticated("its signature or its form is wrong") from None


def caller_from_claims(claims: Mapping[str, Any], auth: Auth) -> Caller:
    """Who the claims name. Roles that are not ours are left out."""
    user, organization = claims.get(auth.user_claim), claims.get(auth.organization_claim)
    for claim, value in ((auth.user_claim, user), (auth.organization_claim, organization)):
        if not isinstance(value, str) or not 0 < len(value) <= MAX_USER or UNSTORABLE_CHARACTERS.search(value):
            raise unauthenticated(f"its claim {claim} is missing or no name")
    given = claims.get(auth.roles_claim, ())
    names = given.split() if isinstance(given, str) else given if isinstance(given, list) else ()
    roles = frozenset(name for name in names if isinstance(name, str) and name in ROLES)
    if not roles:
        message = f"Your token gives you no role here: ask for one of {', '.join(ROLES)} (claim {auth.roles_claim})"
        raise HanzoError(ErrorCode.PERMISSION_DENIED, message)
    return Caller(user_id=str(user), organization=str(organization), roles=roles)


def unauthenticated(why: str) -> HanzoError:
    return HanzoError(ErrorCode.UNAUTHENTICATED, f"The token is refused: {why}")
