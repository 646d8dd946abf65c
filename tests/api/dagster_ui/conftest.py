"""A server with sign-in and one organization, in front of a recorder that replaces Dagster."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.routes.ui.sign_in import COOKIE
from tests.api.auth.iam import Iam
from tests.api.dagster_ui.dagster_recorder import DagsterRecorder, Received
from tests.support.server_process import ServerProcess

ENGINE_TOKEN = "engine-" + "0" * 40


def signed_in_server(home: Path, iam: Iam, dagster_url: str, **extra: str) -> ServerProcess:
    variables = {
        "HANZO_ML_AUTH_VERIFY_TOKENS": "true",
        "HANZO_ML_AUTH_IAM_URL": iam.url,
        "HANZO_ML_AUTH_LEEWAY_SECONDS": "0",
        "HANZO_ML_ENGINE_TOKEN": ENGINE_TOKEN,
        "HANZO_ML_DAGSTER_URL": dagster_url,
    }
    return ServerProcess(home, variables | extra)


@dataclass
class Installation:
    server: ServerProcess
    iam: Iam
    dagster: DagsterRecorder

    def token(self, role: str, organization: str = "acme", **claims: Any) -> str:
        return self.iam.token(f"{role}@{organization}", organization, f"ml-{role}", **claims)

    def client(self, role: str, organization: str = "acme") -> httpx.Client:
        """A program with a bearer token."""
        headers = {"Authorization": f"Bearer {self.token(role, organization)}"}
        return httpx.Client(base_url=self.server.url, headers=headers, timeout=30, trust_env=False)

    def page(self, role: str, organization: str = "acme", **headers: str) -> httpx.Client:
        """A page of this server in a browser that is signed in by the cookie."""
        return httpx.Client(
            base_url=self.server.url,
            headers=headers or {"Origin": self.server.url, "Sec-Fetch-Site": "same-origin"},
            cookies={COOKIE: self.token(role, organization)},
            timeout=30,
            trust_env=False,
        )

    def reached_dagster(self, action: Callable[[], Any]) -> list[Received]:
        """Return what an action made the server send to Dagster."""
        known = len(self.dagster.received)
        action()
        return self.dagster.received[known:]

    def audited(self) -> list[dict[str, Any]]:
        """Return the audited calls of acme's users, newest last."""
        found: list[dict[str, Any]] = []
        with self.client("admin") as admin:
            while page := admin.get("/v1/audit", params={"after": found[-1]["seq"] if found else 0}).json()["events"]:
                found += page
        return [event["payload"] for event in found]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with (
        Iam() as iam,
        DagsterRecorder() as dagster,
        signed_in_server(tmp_path_factory.mktemp("acme"), iam, dagster.url) as server,
    ):
        yield Installation(server, iam, dagster)
