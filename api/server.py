"""`python -m api.server`: serve the API on the settings' host and port, or say in one line why not.

Exits 78 (bad configuration: starting again would not help) where it refuses.
"""

import errno
import ipaddress
import socket
import sys

import uvicorn

from api.app import create_app
from recipes.schema import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.settings import Settings


def main() -> int:
    try:
        settings = Settings.load()
        refuse_unsafe(settings)
        listener = listen(settings.server.host, settings.server.port)
    except BadConfiguration as problem:
        print(f"hanzo-ml: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    with listener:
        config = uvicorn.Config(
            create_app(settings),
            log_level=settings.logging.level,
            access_log=settings.logging.level == "debug",
            timeout_graceful_shutdown=10,
        )
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def refuse_unsafe(settings: Settings) -> None:
    """Without sign-in, only this machine may be served.

    Raises:
        BadConfiguration: the settings ask for sign-in, which is not there yet, or for an open server on a network.
    """
    if settings.auth.verify_tokens:
        raise BadConfiguration(
            "auth.verify_tokens is true, but token verification is not available yet: set it to false and server.host to "
            "127.0.0.1"
        )
    if not is_loopback(settings.server.host):
        raise BadConfiguration(
            f"server.host {settings.server.host} can be reached from a network, and auth.verify_tokens is false: "
            "set server.host to 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only. A name but `localhost` may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound here so that a taken port is noticed before anything else starts.

    Raises:
        BadConfiguration: the port is in use or may not be bound; the message says what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            reason = "is in use"
        elif problem.errno == errno.EACCES:
            reason = "may not be opened by this user"
        else:
            reason = f"cannot be opened ({problem.strerror})"
        raise BadConfiguration(f"port {port} on {host} {reason}: stop what uses it or set HANZO_ML_SERVER_PORT") from None


if __name__ == "__main__":
    sys.exit(main())
