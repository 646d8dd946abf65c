"""Authenticate requests: by a token of the sign-in server in a header or in the web UI's cookie, or by a job's own token."""

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from api.auth.job_tokens import JobTokens, job_token
from api.auth.permissions import Caller
from api.routes.ui import sign_in
from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
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

    def __init__(self, tokens: "Tokens", database: Database) -> None:
        self._tokens = tokens
        self._jobs = JobTokens(database)

    async def caller(self, headers: Headers, *, accepts_cookie: bool) -> Caller:
        """Raises HanzoError: 401 where the request proves nothing, 403 without a role here, 503 if it can't be checked."""
        header = authorization_header(headers) or (cookie_authorization(headers) if accepts_cookie else None)
        token = job_token(header)
        return await self._tokens.caller(header) if token is None else await self._jobs.caller(token)


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
