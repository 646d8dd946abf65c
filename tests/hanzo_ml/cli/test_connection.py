"""A server that dies between commit and response: retries create nothing twice."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient

from hanzo_ml.cli import connection
from hanzo_ml.client.client import Client
from tests.support.cli.command_line import refusal, run
from tests.support.server_process import ServerProcess

CREATE = "/api/2.0/mlflow/runs/create"


class LosesAnswers(ThreadingHTTPServer):
    """Proxies a server, and closes the connection instead of the first responses to `path`."""

    def __init__(self, port: int, path: str, times: int) -> None:
        super().__init__(("127.0.0.1", 0), Forwards)
        self.port, self.path, self.left = port, path, times
        self.url = f"http://127.0.0.1:{self.server_port}"


class Forwards(BaseHTTPRequestHandler):
    server: LosesAnswers

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        onward = HTTPConnection("127.0.0.1", self.server.port)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        onward.request(self.command, self.path, body, headers)
        answer = onward.getresponse()
        content = answer.read()
        onward.close()
        if self.path == self.server.path and self.server.left:
            self.server.left -= 1
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PUT = do_PATCH = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def losing(server: ServerProcess, path: str, times: int) -> Iterator[LosesAnswers]:
    front = LosesAnswers(server.port, path, times)
    thread = threading.Thread(target=front.serve_forever)
    thread.start()
    try:
        yield front
    finally:
        front.shutdown()
        thread.join()
        front.server_close()


@pytest.fixture
def lossy(server: ServerProcess) -> Iterator[LosesAnswers]:
    with losing(server, CREATE, 2) as front:
        yield front


def test_run_is_created_once_despite_lost_answers(lossy: LosesAnswers, server: ServerProcess) -> None:
    client = Client({"HANZO_ML_TRACKING_URI": lossy.url, "HANZO_ML_EXPERIMENT": "lossy"})
    with client.start_run(run_name="once", tags={"team": "x"}) as run:
        run.log_metric("loss", 0.5)
    assert lossy.left == 0, "no answer was lost"
    mlflow = MlflowClient(server.url)
    experiment = mlflow.get_experiment_by_name("lossy")
    assert experiment is not None
    [found] = mlflow.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.info.run_name, found.data.tags["team"]) == (run.id, "once", "x")
    with client.start_run(run_name="once", tags={"team": "x"}) as another:
        assert another.id != run.id, "a second run of the same name is another one"


JOB = "name: once\ncommand: ['true']\n"
SWEEP = """
experiment: once
base_config: {dataset: once, recipe: smollm2-135m-lora, parameters: {max_steps: 3}}
search_space: {learning_rate: {type: uniform, min: 0.1, max: 0.2}}
strategy: random
objective: {metric: eval/loss, direction: minimize}
max_trials: 1
"""


@dataclass(frozen=True)
class Starts:
    """A command that starts work, its request path, and the list of started work."""

    arguments: tuple[str, ...]
    path: str
    listed: str

    def there(self, server: ServerProcess) -> set[str]:
        found = httpx.get(f"{server.url}/v1/{self.listed}", trust_env=False).json()
        return {each["id"] for each in found["sweeps" if self.listed == "hpo" else "jobs"]}


@pytest.fixture(params=["job submit", "hpo start", "dataset prepare"])
def starts(request: pytest.FixtureRequest, server: ServerProcess, tmp_path: Path) -> Starts:
    """Return the commands, for an existing dataset."""
    files = {"files": ("a.jsonl", b'{"instruction": "1+1", "answer": "2"}\n')}
    made = httpx.post(f"{server.url}/v1/datasets", data={"name": "once"}, files=files, trust_env=False).json()["id"]
    config = tmp_path / "config.yaml"
    config.write_text({"job submit": JOB, "hpo start": SWEEP, "dataset prepare": "workers: 1\n"}[request.param])
    words = tuple(request.param.split())
    if words == ("dataset", "prepare"):
        return Starts((*words, "once@1", "--config", str(config)), f"/v1/datasets/{made}/prepare", "jobs")
    listed = "hpo" if "hpo" in words else "jobs"
    return Starts((*words, "--config", str(config)), f"/v1/{listed}", listed)


def test_command_starts_its_work_once_despite_lost_answers(starts: Starts, server: ServerProcess) -> None:
    """The advice "try again" made users train twice."""
    before = starts.there(server)
    with losing(server, starts.path, 2) as front:
        done = run(front.url, *starts.arguments)
        assert front.left == 0, "no answer was lost"
    assert done.returncode == 0, done.stderr
    (made,) = starts.there(server) - before
    assert done.stdout.split()[0] == made


def test_giving_up_prints_an_idempotency_key_for_retrying(
    starts: Starts, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_ATTEMPTS", 2)
    before = starts.there(server)
    with losing(server, starts.path, 9) as front:
        said = refusal(run(front.url, *starts.arguments))
        assert front.left == 7
    found = re.search(r"`--key (\S+)`", said)
    assert found, said
    done = run(server.url, *starts.arguments, "--key", found[1])
    (made,) = starts.there(server) - before
    assert done.stdout.split()[0] == made
    assert run(server.url, *starts.arguments).stdout.split()[0] != made


def test_unreachable_server_is_not_retried(starts: Starts, server: ServerProcess) -> None:
    """Nothing was sent, so nothing may have been started: the error is immediate."""
    with losing(server, starts.path, 0) as front:
        pass
    assert "no server answers at" in refusal(run(front.url, *starts.arguments))


@pytest.mark.parametrize("key", ["", " ", "ü", "a\nb"])
def test_invalid_idempotency_key_is_refused(starts: Starts, server: ServerProcess, key: str) -> None:
    """An empty key, as from an unset variable, would start the work twice."""
    before = starts.there(server)
    assert "--key" in refusal(run(server.url, *starts.arguments, "--key", key))
    assert starts.there(server) == before


def test_polls_share_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kubectl port-forward` hangs after about 2,000 connections."""
    connections: list[object] = []

    class Counts(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            connections.append(self.client_address)
            super().setup()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    with ThreadingHTTPServer(("127.0.0.1", 0), Counts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HANZO_ML_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        answers = [connection.call("GET", "/v1/heartbeats") for _ in range(3)]
        server.shutdown()
        connection._reading_client(False).close()
        connection._reading_client.cache_clear()
    assert answers == [{}] * 3 and len(connections) == 1
