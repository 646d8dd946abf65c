"""A job of one organization, and a client with its token."""

from typing import Any

import httpx

from resources.jobs import job_tokens
from resources.metadata.database import Database
from tests.api.auth.conftest import MLFLOW, SignedIn, made

PROXY = "/api/2.0/mlflow-artifacts/artifacts"


class Job:
    """A job of acme's, and a client with its token."""

    def __init__(self, signed_in: SignedIn, database: Database, name: str = "tokens") -> None:
        acme = signed_in.acme
        self.name = name
        self.id = made(acme.researcher.post("/v1/jobs", json={"name": name, "dataset": "corpus"}))["id"]
        run = made(acme.admin.get(f"/v1/runs/{self.id}"))
        self.experiment = run["experiment_id"]
        with database.write() as connection:
            self.token = job_tokens.issue_token(connection, self.id, 60)
        signed_in.tokens.append(f"..{self.token}")
        self.http = httpx.Client(
            base_url=signed_in.server.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60, trust_env=False
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"{MLFLOW}{path}", json=body)
