"""The token of a job on a cluster: in its own Secret and nowhere else, the same while it is good, gone with the job.

The client is the real one, over HTTP; the API server is as much of one as keeps Secrets.
"""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes.client import ApiClient, ApiException, Configuration, CoreV1Api

from recipes.contracts.job import Job
from resources.compute.credentials import NoCredentials
from resources.compute.kubernetes.gang import plan_gang
from resources.compute.kubernetes.job_manifest import render, to_yaml
from resources.compute.kubernetes.token_secret import TokenKeeper
from resources.jobs import job_tokens
from resources.jobs.job_tokens import TOKEN_PREFIX, JobCredentials
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from tests.postgres_server import migrated_sqlite, sqlite_url
from tests.resources.compute.kubernetes.jobs import KUEUE, a_job, of_kind, program
from tests.resources.compute.kubernetes.schemas import check

__all__ = ["migrated_sqlite", "sqlite_url"]

SECRETS = "/api/v1/namespaces/hanzo-ml/secrets"


class ApiServer:
    """Secrets of one namespace, kept as the API server keeps them: `stringData` comes back as `data`."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        self.allowed = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                item = self.body()
                taken = item["metadata"]["name"] in outer.secrets
                self.answer(409 if taken else 201, {} if taken else outer.put(item))

            def do_GET(self) -> None:
                found = outer.secrets.get(self.name)
                self.answer(200 if found else 404, found or {})

            def do_PUT(self) -> None:
                self.answer(200, outer.put(self.body()))

            def do_PATCH(self) -> None:
                outer.secrets[self.name]["metadata"] |= self.body()["metadata"]
                self.answer(200, outer.secrets[self.name])

            @property
            def name(self) -> str:
                return self.path.removeprefix(f"{SECRETS}/")

            def body(self) -> Any:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, status: int, item: dict[str, Any]) -> None:
                content = json.dumps(item).encode()
                self.send_response(status if outer.allowed and self.path.startswith(SECRETS) else 403)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def put(self, item: dict[str, Any]) -> dict[str, Any]:
        check(item)
        data = {key: base64.b64encode(text.encode()).decode() for key, text in item.pop("stringData").items()}
        kept = self.secrets[item["metadata"]["name"]] = {**item, "data": data}
        return kept


@pytest.fixture
def api_server() -> Iterator[ApiServer]:
    server = ApiServer()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def core(api_server: ApiServer) -> CoreV1Api:
    return CoreV1Api(ApiClient(Configuration(host=f"http://127.0.0.1:{api_server.http.server_port}")))


@pytest.fixture
def database(sqlite_url: str) -> Iterator[Database]:
    database = Database(sqlite_url)
    Jobs(database).submit(name="j", config={"dataset": "d@1"}, user="ann", organization="acme", id=a_job().id)
    yield database
    database.close()


@pytest.fixture
def keeper(core: CoreV1Api, database: Database) -> TokenKeeper:
    return TokenKeeper(core, JobCredentials(database))


def token_for_pods(api_server: ApiServer, job: Job) -> str:
    """What the cluster puts into the environment of the job's pods."""
    [variable] = [item for item in program(job)["env"] if item["name"] == "MLFLOW_TRACKING_TOKEN"]
    reference = variable["valueFrom"]["secretKeyRef"]
    return base64.b64decode(api_server.secrets[reference["name"]]["data"][reference["key"]]).decode()


def run_of(database: Database, token: str) -> str | None:
    with database.read() as connection:
        grant = job_tokens.find_grant(connection, token)
    return grant.run_id if grant else None


def test_pods_sign_in_as_their_job_and_the_secret_goes_with_it(
    api_server: ApiServer, keeper: TokenKeeper, database: Database
) -> None:
    gang = plan_gang(a_job(), KUEUE)
    keeper.ensure(gang)
    token = token_for_pods(api_server, a_job())
    assert token.startswith(TOKEN_PREFIX) and run_of(database, token) == a_job().id
    keeper.hand_over(gang, "jobset.x-k8s.io/v1alpha2", "JobSet", "the-uid")
    [secret] = api_server.secrets.values()
    job_set = of_kind("JobSet", a_job())
    assert secret["metadata"]["ownerReferences"] == [
        {"apiVersion": job_set["apiVersion"], "kind": "JobSet", "name": job_set["metadata"]["name"], "uid": "the-uid"}
    ]


def test_a_supervisor_that_comes_back_leaves_running_pods_their_token(
    api_server: ApiServer, keeper: TokenKeeper, database: Database
) -> None:
    gang = plan_gang(a_job(), KUEUE)
    keeper.ensure(gang)
    first = token_for_pods(api_server, a_job())
    keeper.ensure(gang)
    assert token_for_pods(api_server, a_job()) == first
    JobCredentials(database).revoke(a_job())
    keeper.ensure(gang)
    second = token_for_pods(api_server, a_job())
    assert second != first and (run_of(database, first), run_of(database, second)) == (None, a_job().id)


def test_who_logs_to_nobody_has_no_secret(api_server: ApiServer, keeper: TokenKeeper, core: CoreV1Api) -> None:
    keeper.ensure(plan_gang(a_job(tracking=None), KUEUE))
    nothing = TokenKeeper(core, NoCredentials())
    nothing.ensure(plan_gang(a_job(), KUEUE))
    nothing.hand_over(plan_gang(a_job(), KUEUE), "batch/v1", "Job", "the-uid")
    assert api_server.secrets == {}


def test_a_cluster_that_refuses_is_not_taken_for_one_without_a_secret(api_server: ApiServer, keeper: TokenKeeper) -> None:
    api_server.allowed = False
    with pytest.raises(ApiException, match="403"):
        keeper.ensure(plan_gang(a_job(), KUEUE))
    assert api_server.secrets == {}


def test_what_is_printed_shows_no_token(keeper: TokenKeeper, api_server: ApiServer) -> None:
    keeper.ensure(plan_gang(a_job(), KUEUE))
    text = to_yaml(render(a_job(), KUEUE))
    assert of_kind("Secret", a_job())["stringData"] == {"token": "********"}
    assert token_for_pods(api_server, a_job()) not in text
