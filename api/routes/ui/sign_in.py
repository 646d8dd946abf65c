"""Sign in to the web UI with a cookie.

Browsers cannot send a bearer token when they load a page.

Browsers get the page in place of a refusal, so no route needs to be public. The token is sent once, in the header that every
client uses; the cookie is inaccessible to scripts and to other sites, and accepted for reads only
(`api.middleware.access_control`). The server stores nothing: the cookie is valid as long as the token.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from starlette.datastructures import Headers

from api.auth.permissions import Permission
from api.routing import Router
from resources.errors import invalid

router = Router(strict=False, include_in_schema=False)

COOKIE = "hanzo-ml-token"
MAX_COOKIE = 3800
"""Bytes: browsers limit a cookie with name and attributes to 4,096, and silently drop a longer one."""
PAGE = Path(__file__).parent / "sign_in.html"


@router.get("/login", Permission.SERVER_READ)
def login_page() -> Response:
    return page(200)


@router.post("/login", Permission.SERVER_READ, read_only=True, status_code=204)
def login(request: Request) -> Response:
    """Store the token, which access control has verified, in the browser's cookie."""
    _, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip()
    if not token:
        raise invalid("This server has no sign-in: open its start page")
    if len(token) > MAX_COOKIE:
        raise invalid(
            f"Your token has {len(token)} characters, but browsers store at most {MAX_COOKIE}: ask for one with fewer claims"
        )
    answer = Response(status_code=204)
    secure = request.url.scheme == "https"
    answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure, path="/")
    return answer


@router.post("/logout", Permission.SERVER_READ, read_only=True, status_code=204)
def logout() -> Response:
    """Delete the cookie."""
    answer = Response(status_code=204)
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return answer


def wants_page(method: str, headers: Headers) -> bool:
    """Return whether a browser opens a page without a token, to show sign-in."""
    return method == "GET" and "authorization" not in headers and "text/html" in headers.get("accept", "")


def page(status: int) -> Response:
    text, policy = _page()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(text, status, headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    """Return the page, and a policy that allows only its own script and style."""
    text = PAGE.read_text(encoding="utf-8")
    hashes = {
        tag: base64.b64encode(hashlib.sha256(re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)[0].encode()).digest()).decode()
        for tag in ("script", "style")
    }
    return text, (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
