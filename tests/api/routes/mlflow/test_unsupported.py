"""Unsupported MLflow features are refused once with a clear message.

No client retries the call or tries it another way.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from fastapi.testclient import TestClient
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.server.handlers import get_endpoints

from tests.support.server_process import ServerProcess

WORKSPACES = re.compile("/mlflow/workspaces")
"""For these a client understands the 404 of an unknown path."""
SCRIPT = """
import mlflow

@mlflow.trace
def greet(who):
    return f"ahoy, {who}"

mlflow.set_experiment("traced")
with mlflow.start_run():
    for name in ("ann", "bo"):
        assert greet(name) == f"ahoy, {name}"
    mlflow.log_metric("greeted", 2)
mlflow.flush_trace_async_logging()
"""
LOGS_A_MODEL = """
from mlflow.pyfunc import PythonModel, log_model

class Echo(PythonModel):
    def predict(self, context, model_input):
        return model_input

log_model(name="echo", python_model=Echo(), pip_requirements=["mlflow"])
"""


@pytest.mark.requirement("F1", "F2", "F8")
def test_every_mlflow_endpoint_is_served_or_refused_as_unsupported(http: TestClient) -> None:
    """Detects endpoints that a new release of MLflow adds."""
    unknown: list[str] = []
    refused = 0
    for template, _, methods in get_endpoints():
        path = re.sub("<[^>]*>", "x", template)
        for method in methods:
            answer = http.request(method, path, json=None if method == "GET" else {})
            refused += answer.status_code == 501 and answer.json()["message"].startswith("This server has no ")
            if answer.status_code == 404 and answer.json()["error_code"] == "ENDPOINT_NOT_FOUND":
                unknown.append(path)
    assert [path for path in unknown if not WORKSPACES.search(path)] == []
    assert refused > 150


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/api/3.0/mlflow/traces", "traces and assessments"),
        ("/api/3.0/mlflow/traces/tr-1/assessments", "traces and assessments"),
        ("/ajax-api/2.0/mlflow/webhooks/1/test", "webhooks"),
        ("/api/3.0/mlflow/datasets/create", "evaluation datasets"),
        ("/api/3.0/mlflow/scorers/register", "scorers"),
        ("/api/3.0/mlflow/gateway/secrets/create", "AI gateway"),
        ("/api/3.0/mlflow/skills", "skills"),
        ("/api/3.0/mlflow/skills/greeting/versions", "skills"),
    ],
)
def test_unsupported_endpoint_answers_501_naming_the_feature(http: TestClient, path: str, what: str) -> None:
    answer = http.post(path, content=b"\xff no JSON")
    assert (answer.status_code, answer.json()["error_code"]) == (501, "NOT_IMPLEMENTED")
    served = "it supports MLflow's experiments, runs, models and their files"
    hint = ". Set MLFLOW_TRACE_SAMPLING_RATIO=0 in a script's environment to send none" if "/traces" in path else ""
    assert answer.json()["message"] == f"This server has no {what}: {served}{hint}"
    for other in ("/api/3.0/mlflow/tracesx", "/api/3.0/mlflow/nothing"):
        assert http.post(other).json()["error_code"] == "ENDPOINT_NOT_FOUND"


@pytest.mark.parametrize("where", ["http://127.0.0.1:PORT/", "http://localhost:PORT/x", "http://[::ffff:127.0.0.1]:PORT/"])
def test_no_webhook_makes_the_server_call_an_address(server: ServerProcess, where: str) -> None:
    """SSRF, CVE-2026-64849: webhooks are not stored, tested or called by any event."""
    with socket.create_server(("127.0.0.1", 0)) as inside, httpx.Client(base_url=server.url, trust_env=False) as http:
        inside.settimeout(0)
        events = [{"entity": "REGISTERED_MODEL", "action": "CREATED"}]
        for url in (where.replace("PORT", str(inside.getsockname()[1])), "http://169.254.169.254/latest/meta-data"):
            body = {"name": "hook", "url": url, "events": events, "status": "ACTIVE"}
            for prefix in ("/api/2.0/mlflow/webhooks", "/ajax-api/2.0/mlflow/webhooks"):
                sent = [("POST", prefix), ("PATCH", f"{prefix}/1"), ("POST", f"{prefix}/1/test"), ("GET", prefix)]
                for method, path in sent:
                    answer = http.request(method, path, json=None if method == "GET" else body)
                    assert (answer.status_code, answer.json()["error_code"]) == (501, "NOT_IMPLEMENTED"), (method, path)
        model = {"name": f"hooked-{uuid4().hex}"}
        assert http.post("/api/2.0/mlflow/registered-models/create", json=model).is_success
        with pytest.raises(BlockingIOError):  # nothing has connected
            inside.accept()


def test_tracing_script_keeps_running_and_logs_why_traces_are_refused(server: ServerProcess, tmp_path: Path) -> None:
    environ = {**os.environ, "MLFLOW_TRACKING_URI": server.url}
    del environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]  # as for a user
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if " WARNING " in line or " ERROR " in line]
    assert len(warnings) == 2 and all("This server has no traces and assessments" in line for line in warnings), done.stderr
    assert "Retry" not in done.stderr and "Traceback" not in done.stderr
    client = MlflowClient(server.url)
    experiment = client.get_experiment_by_name("traced")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"greeted": 2.0})
    log = (server.home / "server.log").read_text()
    assert "/api/2.0/mlflow/traces" not in log
    with pytest.raises(MlflowException, match="This server has no traces") as refusal:
        client.search_traces(locations=[experiment.experiment_id])
    assert refusal.value.error_code == "NOT_IMPLEMENTED"


def test_disabling_traces_as_advised_silences_warnings_and_keeps_model_logging(
    server: ServerProcess, tmp_path: Path
) -> None:
    """The earlier advice was one `mlflow.tracing.disable()`.

    After it, `log_model` of MLflow's client 3.17 never returned.
    """
    message = httpx.post(f"{server.url}/api/3.0/mlflow/traces").json()["message"]
    advised = re.search(r"([A-Z_]+)=(\S+) in a script's environment", message)
    assert advised is not None, message
    environ = {**os.environ, "MLFLOW_TRACKING_URI": server.url, advised[1]: advised[2]}
    script = SCRIPT.replace("traced", "advised") + LOGS_A_MODEL
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert "This server has no" not in done.stderr
    client = MlflowClient(server.url)
    experiment = client.get_experiment_by_name("advised")
    assert experiment is not None
    assert [model.name for model in client.search_logged_models([experiment.experiment_id])] == ["echo"]
