"""Every route requires a token and is listed in the role matrix.

`test_role_matrix` covers which callers each route permits.
"""

import base64
import re
from itertools import cycle
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import api.app
from api.auth.audit_log import AuditLog
from api.auth.ownership import PARAMETER_KINDS
from api.auth.permissions import Permission
from api.auth.route_matching import Routes
from api.auth.sign_in_tokens import SigningKeys, Tokens
from api.middleware.access_control import AccessControl
from api.routes.ui.sign_in import COOKIE
from api.routing import PUBLIC, Router, undeclared
from resources.metadata.database import Database
from resources.settings.settings import Settings
from tests.api.auth.conftest import SignedIn
from tests.api.auth.iam import Iam, Key
from tests.api.conformance import named_schemas, operations_of
from tests.support.api.forged_tokens import hmac_with_the_public_key, unsigned

PARAMETERS_THAT_NAME_NO_OBJECT = {
    "key",
    "name",
    "number",
    "version",
    "path",
    "tag_key",
    "artifact_path",
    "unserved",
    "program",
    "attempt",
    "sha256",
    "replica",
}
"""`api.auth.ownership` reads `name` and `artifact_path` on the routes where they name an object."""
SIGNED_LINK = "/v1/dataset-files"
"""Its signature is its permission; without one it is refused as incomplete."""
OPEN = {"GET /alive", "GET /ready", "GET /health", f"GET {SIGNED_LINK}"}
FILTERS = {"experiment_ids"}
"""A search restricts itself to the caller's objects by these."""
OF_A_PATH = {"upload_id"}
"""Meaningful only together with the path of an artifact, which is looked up."""


def requests(app: FastAPI) -> list[tuple[str, str]]:
    """Return method and path of every route, with `nothing` for each parameter."""
    return [(route.method, re.sub(r"\{[^}]*\}", "nothing", route.template)) for route in Routes(app).all]


def is_open(method: str, path: str) -> bool:
    return f"{'GET' if method == 'HEAD' else method} {path}" in OPEN


def test_every_route_declares_a_permission(app: FastAPI) -> None:
    assert undeclared(app) == []


def test_an_application_with_an_undeclared_route_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = Router("/v1")
    forgotten._main.get("/new")(lambda: "secret")
    monkeypatch.setattr(api.app, "ROUTERS", (*api.app.ROUTERS, forgotten))
    with pytest.raises(TypeError, match="/v1/new"):
        api.app.create_app(Settings.load({"HANZO_ML_HOME": str(tmp_path)}))


@pytest.mark.requirement("W6", "Z21")
def test_only_the_probes_and_signed_links_are_open(app: FastAPI) -> None:
    public = {route.shape for route in Routes(app).all if route.declaration and route.declaration.permission is PUBLIC}
    assert public == OPEN


def test_every_id_parameter_is_known_to_the_organization_check(app: FastAPI) -> None:
    """An id parameter of a new name would bypass the organization check."""
    document = app.openapi()
    names = {name for route in Routes(app).all for name in route.pattern.groupindex}
    assert names - PARAMETER_KINDS.keys() - PARAMETERS_THAT_NAME_NO_OBJECT == set()
    sent: set[str] = set()
    for operations in document["paths"].values():
        for operation in operations.values():
            sent |= {parameter["name"] for parameter in operation.get("parameters", ())}
    bodies = [operation.get("requestBody") for operation in operations_of(document)]
    for name in named_schemas(document, bodies):
        sent |= set(document["components"]["schemas"][name].get("properties", {}))
    ids = {name for name in sent if re.search(r"(^|_)(id|ids|uuid|uuids)$", name)}
    assert ids - PARAMETER_KINDS.keys() - FILTERS - OF_A_PATH - {"user_id"} == set()


@pytest.mark.requirement("W1")
def test_every_route_answers_401_without_a_valid_token(signed_in: SignedIn, app: FastAPI) -> None:
    iam = signed_in.iam
    claims = iam.claims("ann", "acme", "ml-admin")
    tokens = {
        "none": "",
        "bad signature": Key("ec").sign(claims),
        "expired": iam.token("ann", "acme", "ml-admin", exp=1),
        "wrong audience": iam.token("ann", "acme", "ml-admin", aud="hanzo-chat"),
        "wrong issuer": iam.token("ann", "acme", "ml-admin", iss="https://evil.example"),
        "HS256 with the public key": hmac_with_the_public_key(iam, claims),
        "alg none": unsigned(iam, claims),
    }
    signed_in.tokens += [token for token in tokens.values() if token]
    bad = cycle(name for name in tokens if name != "none")
    with httpx.Client(base_url=signed_in.server.url, trust_env=False) as http:
        for method, path in requests(app):
            if is_open(method, path):
                assert http.request(method, path).status_code == (400 if path == SIGNED_LINK else 200)
                continue
            # All routes share one check: each route sees two of the tokens, each token dozens of the routes.
            for what in ("none", next(bad)):
                token = tokens[what]
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                answer = http.request(method, path, headers=headers)
                assert answer.status_code == 401, (what, method, path, answer.text)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.json()["error_code"] == "UNAUTHENTICATED"
                assert not token or token not in answer.text


@pytest.mark.parametrize("pair", ["admin:password1234", "admin:password", "admin:admin", "admin:", ":"])
def test_default_basic_auth_password_is_rejected_by_every_route(signed_in: SignedIn, app: FastAPI, pair: str) -> None:
    """CVE-2026-2635: the first pair is the default of MLflow's server with basic auth.

    MLflow's clients send such pairs.
    """
    encoded = base64.b64encode(pair.encode()).decode()
    user, _, password = pair.partition(":")
    with httpx.Client(base_url=signed_in.server.url, trust_env=False) as http:
        for method, path in requests(app):
            if not is_open(method, path):
                answer = http.request(method, path, headers={"Authorization": f"Basic {encoded}"})
                assert answer.status_code == 401, (method, path, answer.text)
                assert answer.headers["www-authenticate"] == "Bearer", "a browser would ask for a password"
        for word in filter(None, (user, password, encoded)):
            assert http.get("/v1/jobs", headers={"Authorization": f"Bearer {word}"}).status_code == 401
            assert http.get("/v1/jobs", headers={"Cookie": f"{COOKIE}={word}"}).status_code == 401
        made = http.post("/api/2.0/mlflow/users/create", json={"username": "eve", "password": "longer than twelve"})
        assert made.status_code == 401
    assert signed_in.acme.admin.get("/signup").status_code == 404, "nobody is let in by a password of his own"


def test_unknown_path_answers_401_without_a_token(signed_in: SignedIn) -> None:
    assert httpx.get(f"{signed_in.server.url}/nothing/here", trust_env=False).status_code == 401
    answer = signed_in.acme.viewer.get("/nothing/here")
    assert (answer.status_code, answer.json()["error_code"]) == (404, "ENDPOINT_NOT_FOUND")
    refused = signed_in.acme.viewer.put("/alive")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.requirement("W3")
def test_researcher_cancels_and_resumes_only_own_jobs(signed_in: SignedIn) -> None:
    acme = signed_in.acme
    own = acme.researcher.post("/v1/jobs", json={"name": "own", "dataset": "corpus"}).json()["id"]
    others = acme.admin.post("/v1/jobs", json={"name": "others", "dataset": "corpus"}).json()["id"]
    assert acme.researcher.post(f"/v1/jobs/{others}/cancel").status_code == 403
    assert acme.admin.get(f"/v1/jobs/{others}").json()["status"] == "queued"
    assert acme.researcher.post(f"/v1/jobs/{own}/cancel").json()["status"] == "cancelled"
    assert acme.admin.post(f"/v1/jobs/{others}/cancel").json()["status"] == "cancelled"
    assert acme.researcher.post(f"/v1/jobs/{others}/resume").status_code == 403
    assert acme.researcher.post(f"/v1/jobs/{own}/resume").json()["status"] == "queued"
    assert acme.admin.post(f"/v1/jobs/{others}/resume").json()["status"] == "queued"


def test_undeclared_route_is_refused_even_to_admin(tmp_path: Path) -> None:
    """The same authorization in front of an application with one more route."""
    with Iam() as iam:
        settings = Settings.load({"HANZO_ML_HOME": str(tmp_path), "HANZO_ML_AUTH_IAM_URL": iam.url})
        database = Database(settings.database_url)
        database.migrate()
        app = FastAPI(openapi_url=None)
        app.get("/v1/new")(lambda: "secret")
        declared = Router("/v1")
        declared.get("/jobs", Permission.JOBS_READ)(lambda: "listed")
        declared.include_in(app)
        guard = AccessControl(
            app,
            routes=Routes(app),
            tokens=Tokens(settings.auth, SigningKeys(settings.auth)),
            database=database,
            audit_log=AuditLog(database),
            max_body_bytes=1000,
        )
        http = TestClient(guard, headers={"Authorization": f"Bearer {iam.token('ann', 'acme', 'ml-admin')}"})
        assert http.get("/v1/jobs").status_code == 200
        answer = http.get("/v1/new")
        assert answer.status_code == 403 and "secret" not in answer.text
        database.close()


def test_no_token_was_written_anywhere(signed_in: SignedIn) -> None:
    log = (signed_in.server.home / "server.log").read_text()
    with Database(signed_in.server.settings.database_url).read() as connection:
        rows = str(connection.exec_driver_sql("SELECT * FROM events").all())
    assert "Application startup complete" in log and len(signed_in.tokens) > 10
    for token in signed_in.tokens:
        signature = token.split(".")[2] or token.split(".")[1]
        assert signature not in log and signature not in rows
