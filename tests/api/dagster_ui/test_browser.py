"""Dagster's real web server behind the sign-in, used by people in a browser."""

from collections.abc import Iterator

import pytest

from tests.api.auth.iam import Iam
from tests.api.dagster_ui.conftest import Installation, signed_in_server
from tests.api.dagster_ui.dagster_webserver import DagsterWebserver
from tests.support.browser_session import BrowserSession

CHECKPOINT = "/dagster/assets/models/tiny/checkpoint"
MATERIALIZE = "[...document.querySelectorAll('button')].find(button => button.innerText === 'Materialize')"
RUNS = "{ runsOrError { ... on Runs { results { runId status } } } }"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Start an installation with Dagster's own web server."""
    homes = tmp_path_factory.mktemp("dagster"), tmp_path_factory.mktemp("api")
    with (
        Iam() as iam,
        DagsterWebserver(homes[0]) as dagster,
        signed_in_server(homes[1], iam, dagster.url) as server,
    ):
        yield Installation(server, iam, None)  # type: ignore[arg-type]


def sign_in(browser: BrowserSession, token: str) -> None:
    browser.shows("Your token of the sign-in server")
    browser.run(f"document.querySelector('input').value = {token!r}")
    browser.run("document.querySelector('button').click()")


def runs(installation: Installation) -> list[dict[str, str]]:
    with installation.client("admin") as admin:
        found: list[dict[str, str]] = admin.post("/dagster/graphql", json={"query": RUNS}).json()["data"]["runsOrError"][
            "results"
        ]
        return found


def test_viewer_reads_and_researcher_launches(real: Installation) -> None:
    with BrowserSession() as browser:
        browser.open(f"{real.server.url}/dagster/asset-groups")
        sign_in(browser, real.token("viewer"))
        browser.shows("checkpoint")
        browser.open(f"{real.server.url}{CHECKPOINT}")
        browser.shows("Never materialized")
        browser.run(f"{MATERIALIZE}.click()")
        browser.shows("Your role (ml-viewer) does not include jobs:submit")
        assert runs(real) == []
        assert browser.run("fetch('/logout', {method: 'POST'}).then(answer => answer.status)") == 204

        browser.open(f"{real.server.url}{CHECKPOINT}")
        sign_in(browser, real.token("researcher"))
        browser.shows("Never materialized")
        browser.run(f"{MATERIALIZE}.click()")
        browser.shows("Launched run")
        [run] = runs(real)
        browser.open(f"{real.server.url}/dagster/runs/{run['runId']}")
        browser.shows("trained by the researcher's click")  # the log arrives by a subscription
        browser.shows("Success")
    launched = [call for call in real.audited() if call["status"] == 200 and call["route"] == "/dagster/graphql"]
    assert [(call["user"], call["objects"]) for call in launched] == [
        ("researcher@acme", ["mutation:launchPipelineExecution", f"dagster run:{run['runId']}"])
    ]


def test_files_and_logs_pass_through_unchanged(real: Installation) -> None:
    with real.client("viewer") as viewer:
        page = viewer.get("/dagster/runs", headers={"Accept": "text/html"})
        assert "/dagster/_next/static/" in page.text and "nonce" in page.headers["content-security-policy"]
        scripts = [part.partition('"')[0] for part in page.text.split('src="')[1:]]
        answer = viewer.get(next(script for script in scripts if script.endswith(".js")))
        assert answer.status_code == 200 and len(answer.content) > 1000 and "etag" in answer.headers
        again = viewer.get(answer.request.url.path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        part = viewer.get(answer.request.url.path, headers={"Range": "bytes=0-9", "Accept-Encoding": "identity"})
        assert (part.status_code, len(part.content)) == (206, 10)
        assert viewer.get("/dagster/logs/nothing/out").status_code == 404
        assert viewer.get("/dagster/download_debug/nothing").status_code in (404, 500)
        introspection = viewer.post("/dagster/graphql", json={"query": "{ __schema { mutationType { name } } }"})
        assert introspection.json() == {"data": {"__schema": {"mutationType": {"name": "Mutation"}}}}
        wrong = viewer.post("/dagster/graphql", json={"query": "{ nothing }"})
        assert wrong.status_code == 400 and "Cannot query field" in wrong.json()["errors"][0]["message"]
    for role, status in (("researcher", 403), ("admin", 200)):
        with real.client(role) as client:
            reported = client.post("/dagster/report_asset_materialization/models/tiny/checkpoint", json={"description": "a"})
            assert reported.status_code == status
