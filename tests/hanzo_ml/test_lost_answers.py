"""A server that dies between commit and answer: what was made is made once, though it is asked for again."""

import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mlflow import MlflowClient

from hanzo_ml.client import Client
from tests.api.server_process import ServerProcess

CREATE = "/api/2.0/mlflow/runs/create"


class LosesAnswers(ThreadingHTTPServer):
    """Stands in front of a server, and closes the connection in place of the first answers to `path`."""

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
        """Says nothing."""


@pytest.fixture
def lossy(server: ServerProcess) -> Iterator[LosesAnswers]:
    front = LosesAnswers(server.port, CREATE, 2)
    thread = threading.Thread(target=front.serve_forever)
    thread.start()
    yield front
    front.shutdown()
    thread.join()
    front.server_close()


def test_a_run_is_made_once(lossy: LosesAnswers, server: ServerProcess) -> None:
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
