"""Detect cross-site requests, which a browser sends with the cookie of this server's own pages."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers

DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def is_same_origin(headers: Headers) -> bool:
    """Return whether the request was certainly sent by a page of this server.

    Ports are compared too: `SameSite` cookies ignore them.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:  # set by the browser, and not forgeable by a page
        return site == "same-origin"
    origin = headers.get("origin")
    return origin is not None and authority(origin) == authority(f"{urlsplit(origin).scheme}://{headers.get('host', '')}")


def is_from_browser(headers: Headers) -> bool:
    """Return whether a web page sent the request: programs send neither header."""
    return "sec-fetch-site" in headers or "origin" in headers


def authority(url: str) -> tuple[str | None, int | None]:
    """Return host and port of a URL; (None, None) if it is malformed."""
    try:
        parts = urlsplit(url)
        return parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None, None
