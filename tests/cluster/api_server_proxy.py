"""A proxy in front of the real API server that breaks watch streams.

It fails as servers and networks do.
"""

import json
import ssl
import threading
from base64 import b64decode
from http.client import HTTPResponse, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml

CUT, GONE, SILENT, VERSIONLESS = "cut", "gone", "silent", "versionless"
"""Faults: watches end at once without an error, answer 410 Gone, or stay silent; lists come without a resource version."""
CHUNK_BYTES = 65_536


class ApiServerProxy:
    """Listens on `address` without TLS, as the administrator of a kubeconfig.

    `faults` may be changed at any time.
    """

    def __init__(self, kubeconfig: Path, address: str) -> None:
        self.faults: frozenset[str] = frozenset()
        self.faults_served = 0
        self.closing = threading.Event()
        config = yaml.safe_load(kubeconfig.read_text())
        self._server = urlsplit(config["clusters"][0]["cluster"]["server"])
        self._tls = tls_context(config)
        self._http = ThreadingHTTPServer((address, 0), make_handler(self))
        self._http.daemon_threads = True
        self.url = f"http://{address}:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()

    def write_kubeconfig(self, path: Path) -> None:
        """Write a kubeconfig that points to the proxy."""
        context = {"cluster": "proxy", "user": "proxy"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": self.url}}],
            "users": [{"name": "proxy", "user": {}}],
            "contexts": [{"name": "proxy", "context": context}],
        }
        path.write_text(yaml.safe_dump(document))

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> HTTPResponse:
        connection = HTTPSConnection(self._server.hostname or "", self._server.port, context=self._tls, timeout=60)
        connection.request(method, path, body or None, headers)
        return connection.getresponse()


def tls_context(config: dict[str, Any]) -> ssl.SSLContext:
    """Return a TLS context with the client certificate of a kubeconfig."""
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]

    def material(owner: dict[str, Any], name: str) -> bytes:
        data = owner.get(f"{name}-data")
        return b64decode(data) if data else Path(owner[name]).read_bytes()

    context = ssl.create_default_context(cadata=material(cluster, "certificate-authority").decode())
    with TemporaryDirectory() as folder:
        certificate, key = Path(folder, "certificate"), Path(folder, "key")
        certificate.write_bytes(material(user, "client-certificate"))
        key.write_bytes(material(user, "client-key"))
        context.load_cert_chain(certificate, key)
    return context


def make_handler(proxy: ApiServerProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_watch = "watch" in parse_qs(urlsplit(self.path).query)
            faults = proxy.faults
            if is_watch and faults & {CUT, GONE, SILENT}:
                proxy.faults_served += 1
                self.begin(200)
                if GONE in faults:
                    gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
                    self.wfile.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                if SILENT in faults:  # forever: the client has to notice
                    proxy.closing.wait()
                return
            self.pass_on(lists_without_version=VERSIONLESS in faults and not is_watch)

        def do_POST(self) -> None:
            self.pass_on()

        do_DELETE = do_PATCH = do_PUT = do_POST

        def pass_on(self, *, lists_without_version: bool = False) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name: self.headers[name] for name in ("Accept", "Content-Type") if name in self.headers}
            answer = proxy.send(self.command, self.path, body, headers)
            if lists_without_version:
                proxy.faults_served += 1
                document = json.loads(answer.read())
                document["metadata"]["resourceVersion"] = None
                self.begin(answer.status)
                self.wfile.write(json.dumps(document).encode())
                return
            self.begin(answer.status)
            while chunk := answer.read1(CHUNK_BYTES):
                self.wfile.write(chunk)
                self.wfile.flush()

        def begin(self, status: int) -> None:
            """Begin a response whose body ends with the connection."""
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
