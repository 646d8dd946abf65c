"""Signing in to the web UI: a browser cannot send a bearer token with each page, so it keeps one in a cookie.

The page is what a browser is shown instead of a refusal, so no route is open for it. The token travels once, in the header
in which every client sends it; the cookie is out of the reach of scripts and of other sites, and accepted for reads only
(`api.middleware.access_control`). The server keeps nothing: the cookie is worth what the token is, for as long.
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
"""Bytes: browsers keep 4,096 with the name and the attributes, and drop a longer one without a word."""
PAGE = Path(__file__).parent / "sign_in.html"


@router.get("/login", Permission.SERVER_READ)
def login_page() -> Response:
    return page(200)


@router.post("/login", Permission.SERVER_READ, read_only=True, status_code=204)
def login(request: Request) -> Response:
    """Keep the token, which access control has verified, in the browser."""
    _, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip()
    if not token:
        raise invalid("There is no sign-in on this server: open its start page")
    if len(token) > MAX_COOKIE:
        raise invalid(
            f"Your token has {len(token)} characters, and a browser keeps {MAX_COOKIE}: ask for one with fewer claims"
        )
    answer = Response(status_code=204)
    secure = request.url.scheme == "https"
    answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure, path="/")
    return answer


@router.post("/logout", Permission.SERVER_READ, read_only=True, status_code=204)
def logout() -> Response:
    """Forget the token."""
    answer = Response(status_code=204)
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return answer


def wants_page(method: str, headers: Headers) -> bool:
    """Whether a refused request is a person's, who opens a page: then it is shown where to sign in."""
    return method == "GET" and "authorization" not in headers and "text/html" in headers.get("accept", "")


def page(status: int) -> Response:
    text, policy = _page()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(text, status, headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    """The page, and the policy that lets run nothing but its own script."""
    text = PAGE.read_text(encoding="utf-8")
    hashes = {
        tag: base64.b64encode(hashlib.sha256(re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)[0].encode()).digest()).decode()
        for tag in ("script", "style")
    }
    return text, (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
