"""What a request shows of who sends it. Whether that is true, `tokens` and `job_callers` say."""

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from api.routes.ui import sign_in
from resources.errors import ErrorCode, HanzoError


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
