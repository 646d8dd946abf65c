"""Authenticate requests by a token of the sign-in server, of a job or of the engine."""

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
    """What tells who is calling; None where there is no sign-in."""
    if not settings.auth.verify_tokens:
        return None
    # The cryptography behind it costs a laptop, which needs none of it, a tenth of a second at every start.
    from api.auth.sign_in_tokens import SigningKeys, Tokens

    return Tokens(settings.auth, SigningKeys(settings.auth))


class Authenticator:
    """Finds who sends a request."""

    def __init__(self, tokens: "Tokens", database: Database, engine_token: SecretStr | None = None) -> None:
        self._tokens = tokens
        self._engine_token = engine_token
        self._jobs = JobTokens(database)

    async def caller(self, headers: Headers, *, accepts_cookie: bool) -> Caller:
        """Raises HanzoError: 401 where the request proves nothing, 403 without a role here, 503 if it can't be checked."""
        header = authorization_header(headers) or (cookie_authorization(headers) if accepts_cookie else None)
        if is_engine_token(header, self._engine_token):
            return ENGINE_CALLER
        token = job_token(header)
        return await self._tokens.caller(header) if token is None else await self._jobs.caller(token)


ENGINE_CALLER = Caller(user_id="engine", organization=DEFAULT_ORGANIZATION, roles=frozenset({ENGINE}))


def is_engine_token(authorization: str | None, token: SecretStr | None) -> bool:
    """Whether a header has the token that the engine's replicas share (compared in constant time)."""
    scheme, _, given = (authorization or "").partition(" ")
    if token is None or scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.get_secret_value().encode())


def authorization_header(headers: Headers) -> str | None:
    """The one `Authorization` header: with two, a proxy and this server could each believe another."""
    given = headers.getlist("authorization")
    if len(given) > 1:
        raise HanzoError(ErrorCode.UNAUTHENTICATED, "Send one Authorization header")
    return given[0] if given else None


def cookie_authorization(headers: Headers) -> str | None:
    """The token that the web UI keeps in its cookie, as a header: for reads alone, and for pages of this server alone."""
    token = cookie_parser(headers.get("cookie", "")).get(sign_in.COOKIE)
    own = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    return f"Bearer {token}" if token and own else None
