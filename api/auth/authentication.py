"""Authenticate requests by a token of the sign-in server, a job or the engine."""

import hmac
from typing import TYPE_CHECKING

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from api.auth.job_tokens import JobTokens, job_token
from api.auth.permissions import ENGINE, Caller
from api.routes.ui import sign_in
from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.settings.settings import Settings

if TYPE_CHECKING:
    from api.auth.sign_in_tokens import Tokens


def token_verifier(settings: Settings) -> "Tokens | None":
    """Return the verifier of tokens; None without sign-in."""
    if not settings.auth.verify_tokens:
        return None
    # Imported late: the cryptography library adds a tenth of a second to every start, which a laptop does not need.
    from api.auth.sign_in_tokens import SigningKeys, Tokens

    return Tokens(settings.auth, SigningKeys(settings.auth))


class Authenticator:
    """Finds the caller of a request."""

    def __init__(self, tokens: "Tokens", database: Database, engine_token: SecretStr | None = None) -> None:
        self._tokens = tokens
        self._engine_token = engine_token
        self._jobs = JobTokens(database)

    async def caller(self, headers: Headers, *, accepts_cookie: bool) -> Caller:
        """Return the caller.

        Raises:
            HanzoError: 401 without valid credentials, 403 without a role here, 503 if they cannot be checked.
        """
        header = authorization_header(headers) or (cookie_authorization(headers) if accepts_cookie else None)
        if is_engine_token(header, self._engine_token):
            return ENGINE_CALLER
        token = job_token(header)
        return await self._tokens.caller(header) if token is None else await self._jobs.caller(token)


ENGINE_CALLER = Caller(user_id="engine", organization=DEFAULT_ORGANIZATION, roles=frozenset({ENGINE}))


def is_engine_token(authorization: str | None, token: SecretStr | None) -> bool:
    """Return whether a header holds the shared token of the engine's replicas (constant time)."""
    scheme, _, given = (authorization or "").partition(" ")
    if token is None or scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.get_secret_value().encode())


def authorization_header(headers: Headers) -> str | None:
    """Return the `Authorization` header; refuse two, of which a proxy could check the other one."""
    given = headers.getlist("authorization")
    if len(given) > 1:
        raise HanzoError(ErrorCode.UNAUTHENTICATED, "Send one Authorization header")
    return given[0] if given else None


def cookie_authorization(headers: Headers) -> str | None:
    """Return the web UI's token cookie as a header, for reads from this origin."""
    token = cookie_parser(headers.get("cookie", "")).get(sign_in.COOKIE)
    own = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    return f"Bearer {token}" if token and own else None
