"""All routes of the application x roles x own or another organization, against `role_matrix`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from api.auth.route_matching import Route, Routes
from resources.metadata.database import Database
from tests.api.auth.conftest import ENGINE_TOKEN, MLFLOW, Organization, SignedIn, made
from tests.api.auth.role_matrix import WHO_MAY
from tests.support.api.job_client import PROXY, Job
from tests.support.api.route_requests import (
    NOBODYS,
    REMOVALS,
    REQUESTS,
    Request,
    filled,
    first_of_its_mirrors,
    json,
    without_names,
)

pytestmark = pytest.mark.requirement("W2", "W3", "W4", "W5", "Z20")

NAMES_OF_PARAMETERS = re.compile(r"\{[^}]*\}")
TAGGED = [{"key": "mlflow.parentRunId", "value": "{run}"}]
BY_A_JOB: list[Request] = [
    json(f"{MLFLOW}/runs/create", experiment_id="{experiment}", tags=TAGGED),
    json(f"{MLFLOW}/logged-models", experiment_id="{experiment}", name="n", source_run_id="{run}"),
]
"""A job has to name its run as the parent of what it creates."""


def by_route(app: FastAPI, requests: list[Request]) -> dict[str, Request]:
    """Return the first request of each route."""
    routes = Routes(app)
    found: dict[str, Request] = {}
    for method, path, options in requests:
        match = routes.match(method, without_names(path))
        assert match is not None, path
        found.setdefault(first_of_its_mirrors(match.route.shape), (method, path, options))
    return found


def spelled_as(route: Route, path: str) -> str:
    """Return the path of a request below the route's prefix."""
    path = path.replace("/ajax-api/", "/api/")
    if route.template.startswith("/ajax-api/"):
        return path.replace("/api/", "/ajax-api/", 1)
    return f"/api{path}" if route.template.startswith("/api/v1/") else path


class Caller:
    """A caller from acme: a letter of the matrix, and the caller's own objects."""

    def __init__(self, letter: str, http: httpx.Client, own: Mapping[str, str], requests: Mapping[str, Request]) -> None:
        self.letter, self._http, self._own, self._requests = letter, http, own, requests

    def asks(self, route: Route, ids: Mapping[str, str]) -> int | None:
        """Return the response status; None where the route names no object."""
        request = self._requests.get(first_of_its_mirrors(route.shape))
        if request is None:
            return None
        _, path, options = request
        options = {name: filled(value, dict(ids)) for name, value in options.items()}
        return self._http.request(route.method, filled(spelled_as(route, path), dict(ids)), **options).status_code

    def asks_for_own(self, route: Route, may: bool) -> int:
        """Send a request for existing objects, where that changes nothing.

        It only reads, or has to be refused.
        """
        harmless = route.method in ("GET", "HEAD") or not may or self.letter == "j"
        status = self.asks(route, self._own if harmless else NOBODYS)
        if status is not None:
            return status
        path = NAMES_OF_PARAMETERS.sub("nothing", route.template)
        body: dict[str, Any] = {} if route.method in ("GET", "HEAD") else {"json": {}}
        return self._http.request(route.method, path, **body).status_code


@pytest.fixture
def database(signed_in: SignedIn) -> Iterator[Database]:
    database = Database(signed_in.server.settings.database_url)
    yield database
    database.close()


@pytest.fixture
def callers(signed_in: SignedIn, app: FastAPI, database: Database) -> Iterator[list[Caller]]:
    acme, job = signed_in.acme, Job(signed_in, database, "matrix")
    requests = by_route(app, [*REQUESTS, *REMOVALS])
    engine = httpx.Client(headers={"Authorization": f"Bearer {ENGINE_TOKEN}"}, base_url=signed_in.server.url, timeout=60)
    with httpx.Client(base_url=signed_in.server.url, timeout=60, trust_env=False) as nobody, engine:
        yield [
            Caller("n", nobody, acme.ids, requests),
            Caller("e", engine, acme.ids, requests),
            Caller("v", acme.viewer, acme.ids, requests),
            Caller("r", acme.researcher, acme.ids, requests),
            Caller("a", acme.admin, acme.ids, requests),
            Caller("j", job.http, own_of(job, acme), requests | by_route(app, BY_A_JOB)),
        ]


def own_of(job: Job, organization: Organization) -> dict[str, str]:
    """Return a job's own objects, for requests that also name a forbidden one."""
    file = f"{job.experiment}/{job.id}/artifacts/notes.txt"
    made(job.http.put(f"{PROXY}/{file}", content=b"a"))
    body = {"experiment_id": job.experiment, "name": "m", "source_run_id": job.id}
    logged = made(job.http.post(f"{MLFLOW}/logged-models", json=body))["model"]["info"]["model_id"]
    source = f"s3://hanzo-ml/runs/{job.id}/artifacts/notes.txt"
    made(organization.admin.post("/v1/models", json={"name": job.name}))
    made(organization.admin.post(f"{MLFLOW}/model-versions/create", json={"name": job.name, "source": source}))
    own = {"experiment": job.experiment, "run": job.id, "file": file, "logged_model": logged, "model": job.name}
    return {**organization.ids, **own, "job": job.id}


def seen(organization: Organization) -> list[tuple[str, int, str]]:
    """Return everything that the request could have changed."""
    ids = organization.ids
    paths = [
        f"{MLFLOW}/experiments/get?experiment_id={ids['experiment']}",
        f"{MLFLOW}/runs/get?run_id={ids['run']}",
        f"{MLFLOW}/metrics/get-history?run_id={ids['run']}&metric_key=loss",
        f"{MLFLOW}/artifacts/list?run_id={ids['run']}",
        f"{PROXY}/{ids['file']}",
        f"{MLFLOW}/logged-models/{ids['logged_model']}",
        f"{MLFLOW}/registered-models/get?name={ids['model']}",
        *(f"/v1/{path}" for path in ("experiments", f"experiments/{ids['experiment']}/runs", "datasets", "models")),
        *(f"/v1/{path}" for path in (f"jobs/{ids['job']}", f"hpo/{ids['sweep']}", f"models/{ids['model']}/versions")),
    ]
    answers = [(path, organization.admin.get(path)) for path in paths]
    return [(path, answer.status_code, answer.text) for path, answer in answers]


def test_role_matrix_lists_exactly_the_served_routes(app: FastAPI) -> None:
    served = {first_of_its_mirrors(route.shape) for route in Routes(app).all}
    listed = [NAMES_OF_PARAMETERS.sub("{}", route) for route, _ in WHO_MAY]
    assert served - set(listed) == set(), "say in role_matrix who may call it"
    assert sorted(listed) == sorted(served), "a line for what is not there, or twice"


def test_every_route_admits_only_permitted_roles_and_own_objects(
    signed_in: SignedIn, app: FastAPI, callers: list[Caller]
) -> None:
    may = {NAMES_OF_PARAMETERS.sub("{}", route): letters for route, letters in WHO_MAY}
    acme, rival = signed_in.acme, signed_in.rival
    before = seen(acme), seen(rival)
    wrong: list[str] = []
    tried = 0
    for route in Routes(app).all:
        letters = may[first_of_its_mirrors(route.shape)]
        for caller in callers:
            allowed = caller.letter in letters
            refused = 401 if caller.letter == "n" else 403
            own = caller.asks_for_own(route, allowed)
            if (own in (401, 403)) if allowed else own != refused:
                wrong.append(f"{caller.letter} {route.method} {route.template}: {own} for his own, but {letters} may")
            others = caller.asks(route, rival.ids)
            if others is not None and others != (404 if allowed else refused):
                wrong.append(f"{caller.letter} {route.method} {route.template}: {others} for another organization's")
            tried += 1 + (others is not None)
    assert wrong == []
    assert tried > 2000
    assert (seen(acme), seen(rival)) == before
