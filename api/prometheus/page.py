"""The page that Prometheus reads (row V2): a listener of its own, in a thread, so that a slow scrape delays no request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from api.middleware.host_validation import LOOPBACK_NAMES, host_name


@contextmanager
def serve_metrics_page(listener: socket, registry: CollectorRegistry, path: str, any_host: bool) -> Iterator[None]:
    """Serve the page on a listening socket until the block ends. On loopback (`any_host` false) by loopback names only."""

    class Page(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if not any_host and host_name(f"//{self.headers.get('Host', '')}") not in LOOPBACK_NAMES:
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path.partition("?")[0] != path:
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                page = generate_latest(registry)
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", CONTENT_TYPE_LATEST)
                self.send_header("Content-Length", str(len(page)))
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(page)

        def version_string(self) -> str:
            return "hanzo-ml"

        def log_message(self, format: str, *args: object) -> None:
            """Every scrape in the log would be noise."""

    server = ThreadingHTTPServer(listener.getsockname()[:2], Page, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="prometheus", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
