"""What a request shows of who sends it. Whether that is true, `tokens` and `job_callers` say."""

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from api.routes.ui import sign_in
from resources.errors import ErrorCode, HanzoError
from resources.settings import Settings

if TYPE_CHECKING:
    from api.auth.tokens import Tokens


def token_verifier(settings: Settings) -> "Tokens | None":
    """What tells who is calling; None where there is no sign-in."""
    if not settings.auth.verify_tokens:
        return None
    # The cryptography behind it costs a laptop, which needs none of it, a tenth of a second at every start.
    from api.auth.jwks import Keys
    from api.auth.tokens import Tokens

    return Tokens(settings.auth, Keys(settings.auth))


def authorization(headers: Headers) -> str | None:
    """The one `Authorization` header: with two, a proxy and this server could each believe another."""
    given = headers.getlist("authorization")
    if len(given) > 1:
        raise HanzoError(ErrorCode.UNAUTHENTICATED, "Send one Authorization header")
    return given[0] if given else None


def from_page(headers: Headers) -> str | None:
    """The token that the web UI keeps in its cookie, as a header: for reads alone, and for pages of this server alone."""
    token = cookie_parser(headers.get("cookie", "")).get(sign_in.COOKIE)
    own = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    return f"Bearer {token}" if token and own else None
