"""The web UI under sign-in: one sign-in per browser, own organization only, read-only."""

import httpx
import pytest

from api.routes.ui.sign_in import COOKIE, MAX_COOKIE
from api.routes.ui.static_files import build_folder
from tests.api.auth.conftest import MLFLOW, SignedIn
from tests.support.browser_session import BrowserSession

PERSON = {"Accept": "text/html,application/xhtml+xml"}


def by_cookie(signed_in: SignedIn, user: str = "ann", org: str = "acme", role: str = "ml-admin") -> httpx.Client:
    token = signed_in.iam.token(user, org, role)
    signed_in.tokens.append(token)
    return httpx.Client(base_url=signed_in.server.url, cookies={COOKIE: token}, timeout=60, trust_env=False)


def test_browser_without_token_gets_the_sign_in_page_and_a_program_gets_json(signed_in: SignedIn) -> None:
    for path in ("/", "/login", f"{MLFLOW}/experiments/search"):
        answer = httpx.get(signed_in.server.url + path, headers=PERSON, trust_env=False)
        assert answer.status_code == 401 and "Sign in" in answer.text and answer.headers["www-authenticate"] == "Bearer"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
        assert httpx.get(signed_in.server.url + path, trust_env=False).json()["error_code"] == "UNAUTHENTICATED"


def test_cookie_reads_only_the_users_own_organization(signed_in: SignedIn) -> None:
    acme, rival = by_cookie(signed_in), by_cookie(signed_in, "eve", "rival")
    run = signed_in.acme.ids["run"]
    search = {"experiment_ids": [signed_in.acme.ids["experiment"]]}
    assert acme.get(f"/v1/runs/{run}").status_code == 200
    assert run in acme.post("/ajax-api/2.0/mlflow/runs/search", json=search).text
    assert rival.get(f"/v1/runs/{run}").status_code == 404
    assert run not in rival.post("/ajax-api/2.0/mlflow/runs/search", json=search).text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", f"{MLFLOW}/runs/create"),
        ("POST", f"{MLFLOW}/runs/log-metric"),
        ("POST", f"{MLFLOW}/runs/delete"),
        ("POST", "/v1/jobs"),
        ("POST", "/v1/datasets"),
        ("PATCH", "/v1/models/m/versions/1/stage"),
        ("DELETE", "/v1/models/m/deployment"),
        ("PUT", "/api/2.0/mlflow-artifacts/artifacts/1/r/artifacts/login"),
    ],
)
def test_cookie_of_an_admin_cannot_write(signed_in: SignedIn, method: str, path: str) -> None:
    assert by_cookie(signed_in).request(method, path, json={}).status_code == 401


def test_cookie_sent_from_another_site_is_refused(signed_in: SignedIn) -> None:
    for site in ("cross-site", "same-site"):
        assert by_cookie(signed_in).get("/v1/runs/x", headers={"Sec-Fetch-Site": site}).status_code == 401
    assert by_cookie(signed_in).get("/version", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_login_requires_a_valid_token_that_fits_a_cookie(signed_in: SignedIn) -> None:
    url = f"{signed_in.server.url}/login"
    assert httpx.post(url, headers={"Authorization": "Bearer nonsense"}, trust_env=False).status_code == 401
    assert by_cookie(signed_in).post("/login").status_code == 400, "a cookie makes no cookie"
    long = signed_in.iam.token("ann", "acme", "ml-viewer", note="x" * MAX_COOKIE)
    signed_in.tokens.append(long)
    answer = httpx.post(url, headers={"Authorization": f"Bearer {long}"}, trust_env=False)
    assert answer.status_code == 400 and "fewer claims" in answer.json()["message"]
    left = by_cookie(signed_in).post("/logout")
    assert (
        left.status_code == 204
        and f'{COOKIE}=""' in left.headers["set-cookie"]
        and "Max-Age=0" in left.headers["set-cookie"]
    )


@pytest.mark.slow
@pytest.mark.skipif(build_folder() is None, reason="the web UI is in the wheel `mlflow`, which is not installed")
def test_a_person_signs_in_with_a_browser(signed_in: SignedIn) -> None:
    token = signed_in.iam.token("ann", "acme", "ml-viewer")
    signed_in.tokens.append(token)
    with BrowserSession() as browser:
        browser.open(f"{signed_in.server.url}/#/experiments")
        browser.shows("Your token of the sign-in server")
        for text, shown in (("not a token", "The token is refused"), (token, "shared name")):
            browser.run(f"document.querySelector('input').value = {text!r}")
            browser.run("document.querySelector('button').click()")
            browser.shows(shown)
        [cookie] = [cookie for cookie in browser.cookies() if cookie["name"] == COOKIE]
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["secure"], cookie["session"]) == (True, "Strict", False, True)
        assert COOKIE not in browser.run("document.cookie")
        create = f"fetch('/ajax-api/2.0{MLFLOW.removeprefix('/api/2.0')}/runs/create', {{method: 'POST', body: '{{}}'}})"
        assert browser.run(f"{create}.then(answer => answer.status)") in (401, 403)
        assert browser.run("fetch('/logout', {method: 'POST'}).then(answer => answer.status)") == 204
        browser.open(f"{signed_in.server.url}/login")
        browser.shows("Your token of the sign-in server")
        assert browser.cookies() == []
