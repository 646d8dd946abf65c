"""`python -m api.server`: serve the API on the host and port of the settings.

A configuration that cannot be served ends it with one line and exit code 78, which supervisors do not restart.
"""

import errno
import gc
import socket
import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from api.workers import run_workers
from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from recipes.contracts.quantities import parse_duration
from resources.service_logs import configure_logs
from resources.settings.document import home_folder_error
from resources.settings.sections import is_loopback
from resources.settings.settings import Settings

EXIT_INTERRUPTED = 130

if TYPE_CHECKING:
    from fastapi import FastAPI
    from uvicorn import Config


def main() -> int:
    try:
        settings = Settings.load()
        configure_logs(settings.logging.level, settings.logging.format)
        refuse_open_network(settings)
        refuse_idle_workers(settings)
        with ExitStack() as listening:
            listener = listening.enter_context(listen(settings.server.host, settings.server.port, "HANZO_ML_SERVER_PORT"))
            page = listening.enter_context(listen_for_prometheus(settings)) if settings.metrics.enabled else None
            config = load_application(settings)
            if settings.server.workers == 1:
                serve(settings, config, listener, page)
            else:
                run_workers(settings.server.workers, partial(serve, settings, config, listener, page))
    except BadConfiguration as problem:
        print(f"hanzo-ml: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except KeyboardInterrupt:  # uvicorn raises it again after its shutdown
        return EXIT_INTERRUPTED
    return 0


def load_application(settings: Settings) -> "Config":
    """Load the application once, before workers are forked, so that they share its memory.

    It is imported here and not at the top, so that a server with a bad configuration fails at once. Garbage collection is
    off meanwhile: imports free nothing, and collecting takes a fifth of the start. Afterwards everything is frozen, and
    the thresholds are high: a batch allocates a thousand short-lived objects, and searching them for cycles would take a
    third of its decoding.
    """
    gc.disable()
    prepare_database(settings)
    import anyio
    import uvicorn

    import api.prometheus  # noqa: F401 - `serve` uses it
    from api.app import create_app
    from api.coalesced_writes import CoalescingHttpProtocol
    from api.dagster_ui.websocket_proxy import MAX_MESSAGE_BYTES

    app = create_app(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=CoalescingHttpProtocol,
        ws="websockets-sansio" if settings.dagster.url else "none",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=settings.logging.level == "debug",
        timeout_graceful_shutdown=10,
    )
    # Else each worker would import this itself.
    config.load()
    config.get_loop_factory()
    anyio.run(anyio.sleep, 0)
    if settings.server.workers > 1:
        warm_up(app)
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)
    gc.enable()
    return config


def warm_up(app: "FastAPI") -> None:
    """Use the database once, so that workers share the 3 MB that this allocates.

    The connection is closed again: a fork must not inherit one.
    """
    from sqlalchemy.exc import SQLAlchemyError

    try:
        app.state.tracking.experiments.ensure_default()
    except SQLAlchemyError:
        pass  # the workers report it, and wait for the database
    finally:
        app.state.database.close()


def serve(
    settings: Settings, config: "Config", listener: socket.socket, page: socket.socket | None, worker: int = 0
) -> None:
    """Serve until a signal. The first worker serves the Prometheus page of all."""
    from api.prometheus import serve_metrics_page
    from resources.serving.draining_server import DrainingServer

    state = config.app.state  # type: ignore[union-attr]  # an application, not the name of one
    state.request_histogram.count_as(worker)
    with ExitStack() as serving:
        if page is not None and worker == 0:
            any_host = not is_loopback(settings.server.host)
            serving.enter_context(serve_metrics_page(page, state.prometheus, settings.metrics.path, any_host=any_host))
        DrainingServer(config, parse_duration(settings.server.drain)).run(sockets=[listener])


def refuse_open_network(settings: Settings) -> None:
    """Refuse to listen on a network without sign-in.

    Raises:
        BadConfiguration: `server.host` is no loopback address and `auth.verify_tokens` is false.
    """
    if not settings.auth.verify_tokens and not is_loopback(settings.server.host):
        raise BadConfiguration(
            f"server.host {settings.server.host} can be reached from a network, and auth.verify_tokens is false: "
            "set auth.verify_tokens to true, or server.host to 127.0.0.1"
        )


def refuse_idle_workers(settings: Settings) -> None:
    """Refuse several workers over SQLite, which has one writer at a time.

    They would wait for each other, each with a smaller group to commit.

    Raises:
        BadConfiguration: several workers and a SQLite database.
    """
    if settings.server.workers > 1 and settings.database_url.startswith("sqlite"):
        raise BadConfiguration(
            f"server.workers {settings.server.workers} needs PostgreSQL, because SQLite has one writer: "
            "set database.url to a postgresql:// address, or server.workers to 1"
        )


def prepare_database(settings: Settings) -> None:
    """Create the tables of a new database.

    If it does not answer yet, `/ready` reports that.

    Raises:
        BadConfiguration: its folder cannot be created, or its tables are of an earlier release. A start does not migrate
            them, because servers of that release may use them.
    """
    from sqlalchemy.exc import SQLAlchemyError

    from resources.metadata.database import Database
    from resources.metadata.migrate import Revision, create_if_missing

    database = Database(settings.database_url, settings.database.connect_seconds)
    try:
        found = create_if_missing(database)
    except SQLAlchemyError:
        return
    except OSError as error:
        raise home_folder_error(error) from None
    finally:
        database.close()
    if found is Revision.EARLIER:
        raise BadConfiguration(
            "the metadata database has the tables of an earlier release: `hanzo-ml server migrate` brings them to this one"
        )


def listen_for_prometheus(settings: Settings) -> socket.socket:
    """Open the port of the metrics page. A server without monitoring must not start unnoticed.

    Raises:
        BadConfiguration: the port is taken.
    """
    remedy = "HANZO_ML_METRICS_PORT, or HANZO_ML_METRICS_ENABLED=false"
    return listen(settings.server.host, settings.metrics.port, remedy)


def listen(host: str, port: int, remedy: str) -> socket.socket:
    """Return a listening socket.

    It is bound before anything else starts, so that a taken port fails the start at once.

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
