"""`python -m api.server`: serve the API on the settings' host and port, or say in one line why not.

Exits 78 (bad configuration: starting again would not help) where it refuses.
"""

import errno
import gc
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.prometheus.page import served
from recipes.schema import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.settings import Settings, is_loopback


def main() -> int:
    try:
        settings = Settings.load()
        refuse_unsafe(settings)
        with ExitStack() as listening:
            listener = listening.enter_context(listen(settings.server.host, settings.server.port, "HANZO_ML_SERVER_PORT"))
            app = create_app(settings)
            listening.enter_context(metrics_page(settings, app))
            spare_the_collector()
            config = uvicorn.Config(
                app,
                log_level=settings.logging.level,
                access_log=settings.logging.level == "debug",
                timeout_graceful_shutdown=10,
            )
            uvicorn.Server(config).run(sockets=[listener])
    except BadConfiguration as problem:
        print(f"hanzo-ml: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    return 0


def spare_the_collector() -> None:
    """A batch makes a thousand small objects that die young: looking for cycles among them is a third of its decoding."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


def refuse_unsafe(settings: Settings) -> None:
    """Without sign-in, only this machine may be served.

    Raises:
        BadConfiguration: the settings ask for an open server on a network.
    """
    if not settings.auth.verify_tokens and not is_loopback(settings.server.host):
        raise BadConfiguration(
            f"server.host {settings.server.host} can be reached from a network, and auth.verify_tokens is false: "
            "set auth.verify_tokens to true, or server.host to 127.0.0.1"
        )


@contextmanager
def metrics_page(settings: Settings, app: FastAPI) -> Iterator[None]:
    """Prometheus's page on its own port, where it is enabled.

    Raises:
        BadConfiguration: the port is taken. A server that nobody can watch must not start unnoticed.
    """
    if not settings.metrics.enabled:
        yield
        return
    host = settings.server.host
    with (
        listen(host, settings.metrics.port, "HANZO_ML_METRICS_PORT, or HANZO_ML_METRICS_ENABLED=false") as listener,
        served(listener, app.state.prometheus, settings.metrics.path, any_host=not is_loopback(host)),
    ):
        yield


def listen(host: str, port: int, remedy: str) -> socket.socket:
    """A listening socket, bound here so that a taken port is noticed before anything else starts.

    Args:
        remedy: the setting that moves the port.

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
        raise BadConfiguration(f"port {port} on {host} {reason}: stop what uses it or set {remedy}") from None


if __name__ == "__main__":
    sys.exit(main())
