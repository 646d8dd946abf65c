"""A server with sign-in, its IAM, and two organizations with every kind of object."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from api.app import create_app
from resources.settings.settings import Settings
from tests.api.auth.iam import Iam
from tests.api.conformance import Conformance
from tests.resources.hpo.sweep_files import small
from tests.support.server_process import ServerProcess, free_port

MLFLOW = "/api/2.0/mlflow"
ENGINE_TOKEN = "the-token-of-the-engine-s-replicas"
Ask = Callable[..., httpx.Response]


@dataclass
class Organization:
    """Its clients by role, and the ids of its objects."""

    name: str
    admin: httpx.Client
    researcher: httpx.Client
    viewer: httpx.Client
    ids: dict[str, str]


@dataclass
class SignedIn:
    """The server and both organizations. `tokens` are all that were ever sent to it."""

    server: ServerProcess
    iam: Iam
    acme: Organization
    rival: Organization
    tokens: list[str]
    metrics_url: str
    conformance: Conformance

    def client(self, user: str, org: str, *roles: str) -> httpx.Client:
        return client(self.server, self.iam, self.tokens, self.conformance, user, org, *roles)


def client(
    server: ServerProcess, iam: Iam, tokens: list[str], conformance: Conformance, user: str, org: str, *roles: str
) -> httpx.Client:
    """Fails the test that gets a response which contradicts the OpenAPI document."""
    token = iam.token(user, org, *roles)
    tokens.append(token)
    return httpx.Client(
        base_url=server.url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=60,
        trust_env=False,
        event_hooks={"response": [conformance.check]},
    )


def made(answer: httpx.Response) -> Any:
    assert answer.is_success, (str(answer.request.url), answer.text)
    return answer.json()


def objects_of(admin: httpx.Client, name: str) -> dict[str, str]:
    """Create one object of every kind, as users do."""
    experiment = made(admin.post(f"{MLFLOW}/experiments/create", json={"name": "shared name"}))["experiment_id"]
    run = made(admin.post(f"{MLFLOW}/runs/create", json={"experiment_id": experiment}))["run"]["info"]["run_id"]
    made(admin.post(f"{MLFLOW}/runs/log-metric", json={"run_id": run, "key": "loss", "value": 0.5, "timestamp": 1}))
    proxied = f"{experiment}/{run}/artifacts/notes.txt"
    made(admin.put(f"/api/2.0/mlflow-artifacts/artifacts/{proxied}", content=b"secret of " + name.encode()))
    logged = made(admin.post(f"{MLFLOW}/logged-models", json={"experiment_id": experiment, "name": "m"}))
    model = f"model-of-{name}"
    made(admin.post(f"{MLFLOW}/registered-models/create", json={"name": model}))
    source = f"s3://hanzo-ml/runs/{run}/artifacts/notes.txt"
    made(admin.post(f"{MLFLOW}/model-versions/create", json={"name": model, "source": source, "run_id": run}))
    records = b'{"instruction": "1+1", "answer": "2"}\n' * 4
    files = {"files": ("a.jsonl", records, "application/jsonl")}
    dataset = made(admin.post("/v1/datasets", data={"name": "corpus"}, files=files))["id"]
    job = made(admin.post("/v1/jobs", json={"name": f"job-of-{name}", "dataset": "corpus"}))["id"]
    sweep = made(admin.post("/v1/hpo", json=small(base_config={"dataset": "corpus"})))["id"]
    return {
        "experiment": experiment,
        "run": run,
        "file": proxied,
        "logged_model": logged["model"]["info"]["model_id"],
        "model": model,
        "dataset": dataset,
        "job": job,
        "sweep": sweep,
    }


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """Return the application, for its routes."""
    return create_app(Settings.load({"HANZO_ML_HOME": str(tmp_path_factory.mktemp("routes"))}))


@pytest.fixture(scope="session")
def signed_in(conformance: Conformance, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SignedIn]:
    metrics_port = free_port()
    with Iam() as iam:
        extra = {
            "HANZO_ML_AUTH_VERIFY_TOKENS": "true",
            "HANZO_ML_AUTH_IAM_URL": iam.url,
            "HANZO_ML_AUTH_KEYS_RETRY_SECONDS": "0",
            "HANZO_ML_ENGINE_TOKEN": ENGINE_TOKEN,
            "HANZO_ML_METRICS_ENABLED": "true",
            "HANZO_ML_METRICS_PORT": str(metrics_port),
            "HANZO_ML_SERVER_MAX_BODY_BYTES": "100000",
            "HANZO_ML_DAGSTER_URL": f"http://127.0.0.1:{free_port()}",
            "HANZO_ML_DAGSTER_ADMIN_ORGANIZATION": "acme",
        }
        tokens: list[str] = []
        with ServerProcess(tmp_path_factory.mktemp("signed-in"), extra) as server:

            def organization(name: str) -> Organization:
                clients = {
                    role: client(server, iam, tokens, conformance, f"{role}@{name}", name, f"ml-{role}")
                    for role in ("admin", "researcher", "viewer")
                }
                return Organization(name, **clients, ids=objects_of(clients["admin"], name))

            url = f"http://127.0.0.1:{metrics_port}/metrics"
            yield SignedIn(server, iam, organization("acme"), organization("rival"), tokens, url, conformance)
