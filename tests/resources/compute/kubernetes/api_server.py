"""Kubernetes API server that stores objects: create, read, list, watch, delete.

It supports resource versions over HTTP. No controllers run: tests put the objects that controllers would write.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes.client import ApiClient, Configuration

from resources.compute.kubernetes.cluster import ALL_KINDS, Cluster, Kind, find_kind
from resources.compute.kubernetes.setup.permissions import required_permissions
from resources.compute.kubernetes.submission import GANG_KINDS
from resources.settings.scheduler import Scheduler
from tests.resources.compute.kubernetes.authorization import denied

Item = dict[str, Any]
PLURALS = {kind.plural for kind in ALL_KINDS}


class ApiServer:
    """Store objects and answer requests; attributes inject failures.

    `refusal`: status and message that answer every creation; `refusals`: the same by kind. `silent`: watches send
    nothing, not even an end. `versionless_lists`: number of next lists that have no resource version.
    """

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.events: list[tuple[int, str, str, Item]] = []
        self.version = 1
        self.oldest_version = 0
        self.refusal: tuple[int, str] | None = None
        self.refusals: dict[str, tuple[int, str] | None] = {}
        self.silent = False
        self.versionless_lists = 0
        self.requests: list[str] = []
        self.changed = threading.Condition()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(self))
        self.http.daemon_threads = True

    @property
    def cluster(self) -> Cluster:
        configuration = Configuration(host=f"http://127.0.0.1:{self.http.server_port}")
        configuration.retries = False
        return Cluster(ApiClient(configuration))

    def put(self, item: Item, event: str = "MODIFIED") -> Item:
        """Write an object as a controller of the cluster would."""
        metadata = item["metadata"]
        path = find_kind(item).path(metadata.get("namespace"), metadata["name"])
        with self.changed:
            self.version += 1
            metadata.setdefault("uid", f"uid-{self.version}")
            metadata.setdefault("creationTimestamp", timestamp())
            metadata["resourceVersion"] = str(self.version)
            self.items[path] = item
            self.events.append((self.version, path, event, copy.deepcopy(item)))
            self.changed.notify_all()
        return item

    def remove(self, path: str) -> Item:
        with self.changed:
            self.version += 1
            item = self.items.pop(path)
            item["metadata"]["resourceVersion"] = str(self.version)
            self.events.append((self.version, path, "DELETED", copy.deepcopy(item)))
            self.changed.notify_all()
        return item

    def forget_history(self) -> None:
        """Expire the history: watches from an earlier version get 410 Gone."""
        self.oldest_version = self.version

    def find(self, kind: Kind, name: str, namespace: str = "hanzo-ml") -> Item | None:
        return self.items.get(kind.path(namespace, name))

    def names(self, kind: Kind, namespace: str = "hanzo-ml") -> list[str]:
        folder = kind.path(namespace) + "/"
        return sorted(path.removeprefix(folder) for path in self.items if path.startswith(folder))


def timestamp(later: int = 0) -> str:
    """Format the current time, plus `later` seconds, as the API server does."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + later))


def is_selected(item: Item, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels", {})
    wanted = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
    fields = dict(part.split("=") for part in query.get("fieldSelector", "").split(",") if part)
    name = fields.get("involvedObject.name")
    return wanted.items() <= labels.items() and (name is None or item["involvedObject"]["name"] == name)


def make_handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise each response waits 40 ms for an acknowledgement

        def do_GET(self) -> None:
            path, query = self.parts()
            if "watch" in query:
                self.stream(path, query)
            elif path in server.items:
                self.answer(200, server.items[path])
            elif (folder := path.rpartition("/")[2]).endswith("s") and folder.islower() and "-" not in folder:
                found = [
                    item for place, item in list(server.items.items()) if below(path, place) and is_selected(item, query)
                ]
                version = None if server.versionless_lists else str(server.version)
                server.versionless_lists = max(0, server.versionless_lists - 1)
                self.answer(200, {"items": found, "metadata": {"resourceVersion": version}})
            else:
                self.refuse(404, f"{path} not found")

        def do_POST(self) -> None:
            path, query = self.parts()
            item = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            refusal = server.refusals.get(item["kind"], server.refusal)
            if refusal:
                self.refuse(*refusal)
            elif f"{path}/{item['metadata']['name']}" in server.items:
                self.refuse(409, f"{item['kind']} {item['metadata']['name']} already exists")
            elif query.get("dryRun"):
                self.answer(201, item)
            else:
                self.answer(201, server.put(item, "ADDED"))

        def do_PATCH(self) -> None:
            path, _ = self.parts()
            patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            item = server.items.get(path.removesuffix("/status"))
            if item is None:
                self.refuse(404, f"{path} not found")
            elif patch["metadata"]["uid"] != item["metadata"]["uid"]:
                self.refuse(409, "the uid is another")
            else:
                item["status"] |= patch["status"]
                self.answer(200, server.put(item))

        def do_DELETE(self) -> None:
            path, _ = self.parts()
            options = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            uid = options.get("preconditions", {}).get("uid")
            if path not in server.items:
                self.refuse(404, f"{path} not found")
            elif uid not in (None, server.items[path]["metadata"]["uid"]):
                self.refuse(409, f"Precondition failed: UID in precondition: {uid}")
            else:
                self.answer(200, server.remove(path))

        def parts(self) -> tuple[str, dict[str, str]]:
            server.requests.append(f"{self.command} {self.path}")
            split = urlsplit(self.path)
            return split.path, {name: values[0] for name, values in parse_qs(split.query).items()}

        def stream(self, path: str, query: dict[str, str]) -> None:
            if not query["resourceVersion"].isdigit():
                self.refuse(400, f"invalid resource version {query['resourceVersion']!r}")
                return
            since, end = int(query["resourceVersion"]), time.monotonic() + float(query["timeoutSeconds"])
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if since < server.oldest_version:
                self.chunk({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
                since, end = server.version, 0
            while time.monotonic() < end:
                with server.changed:
                    if server.silent:
                        server.changed.wait(0.05)
                        continue
                    found = [event for event in server.events if event[0] > since]
                    if not found:
                        server.changed.wait(0.05)
                for version, place, event, item in found:
                    since = version
                    if below(path, place) and is_selected(item, query):
                        self.chunk({"type": event, "object": item})
            self.wfile.write(b"0\r\n\r\n")

        def chunk(self, event: Any) -> None:
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()

        def refuse(self, status: int, message: str) -> None:
            self.answer(status, {"kind": "Status", "message": message, "code": status})

        def answer(self, status: int, item: Any) -> None:
            content = json.dumps(item).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def below(folder: str, path: str) -> bool:
    """Return whether an object is in a list of one or of all namespaces."""
    root, _, plural = folder.rpartition("/")
    return path.rpartition("/")[0] == folder or (
        "/namespaces/" in path and path.split("/namespaces/")[0] == root and path.split("/")[-2] == plural
    )


@contextmanager
def serving() -> Iterator[ApiServer]:
    server = ApiServer()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


@contextmanager
def serving_controller() -> Iterator[ApiServer]:
    """Serve the API; fail at the end if a request exceeds the controller's roles."""
    with serving() as server:
        yield server
    assert find_denied(server.requests) == []


def find_denied(requests: list[str]) -> list[str]:
    """Return the requests that the roles of no gang backend allow."""
    by_backend = []
    for backend, own in itertools.product(GANG_KINDS, (False, True)):
        settings = {"gang_backend": backend, "namespace_per_organization": own}
        needed = required_permissions(Scheduler.model_validate(settings))
        namespaced = [each.rule for each in needed if not each.cluster_wide]
        cluster_wide = [each.rule for each in needed if each.cluster_wide]
        by_backend.append(denied(requests, namespaced, cluster_wide))
    return min(by_backend, key=len)
