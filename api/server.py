"""`python -m api.server`: serve the API on the settings' host and port, or say in one line why not.

Exits 78 (bad configuration: starting again would not help) where it refuses.
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
    except KeyboardInterrupt:  # uvicorn raises it anew once it has ended what it served
        return EXIT_INTERRUPTED
    return 0


def load_application(settings: Settings) -> "Config":
    """The application with all that serves it, so that workers share it. It is imported only now, so that a server that may
    not start says so at once, and without looking for cycles: nothing dies of what imports make, and the search for it is a
    fifth of the start.

    Nor is anything of it looked at later. A batch makes a thousand small objects that die young: looking for cycles among
    them would be a third of its decoding.
    """
    gc.disable()
    prepare_database(settings)
    import anyio
    import uvicorn

    import api.prometheus  # noqa: F401 - `serve` takes it
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
    # What each worker would else import for itself.
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
    """Begin with the database once, as each worker will: what that allocates, 3 MB, they share.

    No connection is left, because no fork may take one along.
    """
    from sqlalchemy.exc import SQLAlchemyError

    try:
        app.state.tracking.experiments.ensure_default()
    except SQLAlchemyError:
        pass  # the workers say so, and wait for it
    finally:
        app.state.database.close()


def serve(
    settings: Settings, config: "Config", listener: socket.socket, page: socket.socket | None, worker: int = 0
) -> None:
    """Serve until a signal ends it. The first worker has the page of Prometheus, for all."""
    from api.prometheus import serve_metrics_page
    from resources.serving.draining_server import DrainingServer

    state = config.app.state  # type: ignore[union-attr]  # `load_application` gave it an application, not the name of one
    state.request_histogram.count_as(worker)
    with ExitStack() as serving:
        if page is not None and worker == 0:
            any_host = not is_loopback(settings.server.host)
            serving.enter_context(serve_metrics_page(page, state.prometheus, settings.metrics.path, any_host=any_host))
        DrainingServer(config, parse_duration(settings.server.drain)).run(sockets=[listener])


def refuse_open_network(settings: Settings) -> None:
    """Without sign-in, only this machine may be served.

    Raises:
        BadConfiguration: the settings ask for an open server on a network.
    """
    if not settings.auth.verify_tokens and not is_loopback(settings.server.host):
        raise BadConfiguration(
            f"server.host {settings.server.host} can be reached from a network, and auth.verify_tokens is false: "
            "set auth.verify_tokens to true, or server.host to 127.0.0.1"
        )


def refuse_idle_workers(settings: Settings) -> None:
    """SQLite lets one process write at a time: more of them would wait for each other, each with a smaller group to commit.

    Raises:
        BadConfiguration: the settings ask for several workers over SQLite.
    """
    if settings.server.workers > 1 and settings.database_url.startswith("sqlite"):
        raise BadConfiguration(
            f"server.workers {settings.server.workers} needs PostgreSQL, because SQLite has one writer: "
            "set database.url to a postgresql:// address, or server.workers to 1"
        )


def prepare_database(settings: Settings) -> None:
    """Make the tables of a new database. One that does not answer yet is waited for by whoever asks `/ready`.

    Raises:
        BadConfiguration: there is no folder for it, and none can be made; or it has the tables of an earlier release. To
            change them is not for a start to decide: servers of that release may work on them.
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
    """The listener of the metrics page. A server that nobody can watch must not start unnoticed.

    Raises:
        BadConfiguration: the port is taken.
    """
    remedy = "HANZO_ML_METRICS_PORT, or HANZO_ML_METRICS_ENABLED=false"
    return listen(settings.server.host, settings.metrics.port, remedy)


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
