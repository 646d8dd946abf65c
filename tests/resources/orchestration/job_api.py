"""In-memory Kubernetes API for the Jobs and pods of the run launcher, without controllers."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from resources.orchestration.launcher_role import launcher_objects
from resources.settings.sections import RunPods
from tests.resources.compute.kubernetes.authorization import denied

PATH = re.compile(r"/(?:api/v1|apis/batch/v1)/namespaces/([^/]+)/(jobs|pods)(?:/([^/]+))?(?:/status)?")
API_VERSIONS = {"jobs": "batch/v1", "pods": "v1"}
KINDS = {"jobs": "Job", "pods": "Pod"}


class JobApi:
    """Store `objects` by kind and name; `failing` is a status that every request gets."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, dict[str, Any]]] = {"jobs": {}, "pods": {}}
        self.requests: list[str] = []
        self.failing: int | None = None

    def add_pod(self, job: str, name: str, **status: Any) -> dict[str, Any]:
        labels = {**self.objects["jobs"][job]["metadata"]["labels"], "batch.kubernetes.io/job-name": job}
        pod = {
            "metadata": {"name": name, "labels": labels},
            "spec": {"nodeName": "node-1", "containers": []},
            "status": {"phase": "Running", **status},
        }
        self.objects["pods"][name] = pod
        return pod

    def answer(self, method: str, address: str, body: bytes) -> tuple[int, Any]:
        parts = urlsplit(address)
        found = PATH.fullmatch(parts.path)
        self.requests.append(f"{method} {parts.path}")
        if self.failing or found is None:
            return self.failing or 404, {"message": "failing"}
        _, kind, name = found.groups()
        known = self.objects[kind]
        if method == "POST":
            item = json.loads(body)
            if item["metadata"]["name"] in known:
                return 409, {"reason": "AlreadyExists"}
            known[item["metadata"]["name"]] = {**item, "status": {}}
            return 201, item
        if name is None:
            selector = dict(part.split("=") for part in parse_qs(parts.query)["labelSelector"][0].split(","))
            items = [item for item in known.values() if selector.items() <= item["metadata"]["labels"].items()]
            return 200, {"apiVersion": API_VERSIONS[kind], "kind": f"{KINDS[kind]}List", "items": items}
        if unquote(name) not in known:
            return 404, {"reason": "NotFound"}
        if method == "DELETE":
            return 200, known.pop(name)
        return 200, known[name]


@contextmanager
def job_api(folder: Path) -> Iterator[tuple[JobApi, Path]]:
    """Yield the server and the kubeconfig file that names it.

    Fails at the end if a request exceeds the launcher's role.
    """
    api = JobApi()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = api.answer(self.command, self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = reply

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    kubeconfig = folder / "kubeconfig"
    cluster = {"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
    users = [{"name": "test", "user": {}}]
    document = {"clusters": [cluster], "contexts": [context], "users": users, "current-context": "test"}
    kubeconfig.write_text(yaml.safe_dump(document))
    try:
        yield api, kubeconfig
    finally:
        server.shutdown()
        server.server_close()
    [role] = [item for item in launcher_objects(RunPods()) if item["kind"] == "Role"]
    assert denied(api.requests, role["rules"], ()) == []
