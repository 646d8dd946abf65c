"""The audit log records who called what."""

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from api.app import create_app
from api.auth.audit_log import AuditLog, Call
from api.auth.route_matching import Routes
from resources.metadata.audit_log import MAX_OBJECTS, AuditedCall, flush_counts, list_calls, record_calls
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.ownership import ObjectKind, Reference
from tests.api.auth.conftest import MLFLOW, SignedIn
from tests.api.auth.iam import Iam
from tests.api.conftest import migrated
from tests.support.api.audited_requests import asking
from tests.support.api.dataset_contract import create, validate
from tests.support.api.reads_by_post import READS_BY_POST

pytestmark = pytest.mark.requirement("Q7", "X4")


def calls(signed_in: SignedIn, user: str, **params: Any) -> list[dict[str, Any]]:
    params = {"user": user, "limit": 1000, **params}
    answer = signed_in.acme.admin.get("/v1/audit", params=params).raise_for_status()
    return [event["payload"] for event in answer.json()["events"]]


def test_change_is_audited_before_its_response_is_sent(signed_in: SignedIn) -> None:
    carol = signed_in.client("carol", "acme", "ml-researcher", "ml-viewer")
    run = carol.post(f"{MLFLOW}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    carol.post(f"{MLFLOW}/runs/update", json={"run_id": run, "run_name": "n"})
    created, updated = calls(signed_in, "carol")
    assert (updated["method"], updated["route"], updated["status"]) == ("POST", f"{MLFLOW}/runs/update", 200)
    assert (updated["user"], updated["organization"]) == ("carol", "acme")
    assert updated["roles"] == ["ml-researcher", "ml-viewer"]
    assert updated["objects"] == [f"run:{run}"] and updated["client"] == "127.0.0.1"
    assert updated["duration_ms"] > 0 and updated["count"] == 1
    assert created["objects"][0].startswith("experiment:")


def test_reading_dataset_records_is_audited_and_other_reads_are_not(signed_in: SignedIn) -> None:
    dora = signed_in.client("dora", "acme", "ml-viewer")
    dataset = signed_in.acme.ids["dataset"]
    assert dora.get(f"/v1/datasets/{dataset}").status_code == 200
    assert dora.get(f"/v1/datasets/{dataset}/preview").status_code == 200
    [opened] = calls(signed_in, "dora")
    assert (opened["route"], opened["objects"]) == ("/v1/datasets/{dataset_id}/preview", [f"dataset:{dataset}"])


def test_refused_calls_are_audited(signed_in: SignedIn) -> None:
    eve = signed_in.client("eve", "acme", "ml-viewer")
    foreign = signed_in.rival.ids["run"]
    eve.post("/v1/jobs", json={"name": "x", "dataset": "corpus"})
    eve.get(f"/v1/runs/{foreign}")
    assert [(call["route"], call["status"], call["objects"]) for call in calls(signed_in, "eve")] == [
        ("/v1/jobs", 403, ["registered model:x"]),
        ("/v1/runs/{run_id}", 404, [f"run:{foreign}"]),
    ]


def test_forbidden_call_is_audited_with_its_target_object(signed_in: SignedIn) -> None:
    """The log lacked the model whose promotion was attempted."""
    finn = signed_in.client("finn", "acme", "ml-viewer")
    names = [signed_in.acme.ids["model"], signed_in.rival.ids["model"], "nobody-s"]
    for name in names:
        answer = finn.patch(f"/v1/models/{name}/versions/1/stage", json={"stage": "production"})
        assert answer.status_code == 403 and name not in answer.text
    job = signed_in.rival.ids["job"]
    finn.post(f"/v1/jobs/{job}/cancel")
    finn.post(f"{MLFLOW}/model-versions/transition-stage", json={"name": names[1], "version": "1", "stage": "production"})
    finn.post(f"{MLFLOW}/model-versions/transition-stage", content=b"{", headers={"Content-Type": "application/json"})
    finn.post(f"{MLFLOW}/registered-models/alias", json={"name": names[0], "alias": "x" * (65 << 10), "version": "1"})
    gwen = signed_in.client("gwen", "acme", "ml-researcher")
    straight = gwen.post("/v1/models/register", json={"name": names[0], "artifact_uri": "runs:/r/m", "stage": "production"})
    stage = "/v1/models/{name}/versions/{version}/stage"
    assert [(call["route"], call["status"], call["objects"]) for call in calls(signed_in, "finn")] == [
        *((stage, 403, [f"registered model:{name}"]) for name in names),
        ("/v1/jobs/{job_id}/cancel", 403, [f"job:{job}"]),
        (f"{MLFLOW}/model-versions/transition-stage", 403, [f"registered model:{names[1]}"]),
        (f"{MLFLOW}/model-versions/transition-stage", 403, []),
        (f"{MLFLOW}/registered-models/alias", 403, []),
    ]
    assert straight.status_code == 403
    assert f"registered model:{names[0]}" in calls(signed_in, "gwen")[0]["objects"]


def test_audit_log_is_visible_only_to_admins_of_the_organization(signed_in: SignedIn) -> None:
    events = signed_in.rival.admin.get("/v1/audit", params={"limit": 1000}).json()["events"]
    assert {event["payload"]["organization"] for event in events} == {"rival"}
    assert {(event["topic"], event["type"]) for event in events} == {("audit", "audit.call")}
    assert signed_in.acme.researcher.get("/v1/audit").status_code == 403
    last = events[-1]
    later = {"since": last["created_at"] + 1, "limit": 1000}
    assert all(event["seq"] > last["seq"] for event in signed_in.rival.admin.get("/v1/audit", params=later).json()["events"])
    assert signed_in.rival.admin.get("/v1/audit", params={"type": "other"}).json()["events"] == []
    shown = signed_in.acme.admin.get("/v1/events", params={"limit": 1000}).json()["events"]
    assert "audit" not in {event["topic"] for event in shown}


@pytest.mark.slow
def test_repeated_metric_calls_are_audited_as_one_row_with_a_count(signed_in: SignedIn) -> None:
    fred = signed_in.client("fred", "acme", "ml-researcher")
    run = fred.post(f"{MLFLOW}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    for step in range(20):
        point = {"run_id": run, "key": "loss", "value": 1.0, "timestamp": 1, "step": step}
        assert fred.post(f"{MLFLOW}/runs/log-metric", json=point).status_code == 200
    httpx.post(f"{signed_in.server.url}/v1/jobs", trust_env=False)
    signed_in.server.stop()
    signed_in.server.start()
    logged = [call for call in calls(signed_in, "fred") if call["route"].endswith("/log-metric")]
    assert 1 <= len(logged) <= 2
    assert sum(call["count"] for call in logged) == 20
    assert {(call["status"], *call["objects"]) for call in logged} == {(200, f"run:{run}")}
    with Database(signed_in.server.settings.database_url).read() as connection:
        unknown = [event.payload for event in list_calls(connection, "", limit=1000)]
    assert 401 in {call["status"] for call in unknown} and any(call["route"] == "/v1/jobs" for call in unknown)


def test_counts_are_written_once_a_minute(tmp_path: Path) -> None:
    now = 1_000_000_000
    database = Database(f"sqlite:///{tmp_path}/a.db")
    database.migrate()
    trail = AuditLog(database, lambda: now)
    call = AuditedCall("u", "o", (), "POST", "/r", ("run:1",), 200, "c", 2.0)

    def written() -> list[int]:
        with database.read() as connection:
            return [event.payload["count"] for event in list_calls(connection, "o")]

    async def log(times: int) -> None:
        for _ in range(times):
            trail.count(call)
        await trail.flush()

    asyncio.run(log(3))
    assert written() == [3]
    now += 30_000
    asyncio.run(log(4))
    assert written() == [3]
    now += 31_000
    asyncio.run(log(5))
    assert written() == [3, 9]
    now += 139_000
    asyncio.run(log(0))
    assert written() == [3, 9]
    asyncio.run(log(1))
    asyncio.run(trail.flush(everything=True))
    assert written() == [3, 9, 1]
    database.close()


@pytest.fixture
def local(tmp_path: Path) -> FastAPI:
    """A server without sign-in. It writes its counts when it stops."""
    return create_app(migrated(tmp_path))


def recorded_in(app: FastAPI) -> list[dict[str, Any]]:
    database = Database(app.state.settings.database_url)
    with database.read() as connection:
        found = [dict(event.payload) for event in list_calls(connection, "default", limit=1000)]
    database.close()
    return found


def test_changes_are_audited_without_sign_in(local: FastAPI) -> None:
    with asking(local) as http:
        run = http.post(f"{MLFLOW}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
        for step in range(5):
            point = {"run_id": run, "key": "loss", "value": 1.0, "timestamp": 1, "step": step}
            assert http.post(f"{MLFLOW}/runs/log-metric", json=point).status_code == 200
        records = b'{"instruction": "1+1", "answer": "2"}\n' * 4
        files = {"files": ("a.jsonl", records, "application/jsonl")}
        dataset = http.post("/v1/datasets", data={"name": "corpus"}, files=files).json()["id"]
        http.get(f"/v1/datasets/{dataset}/preview")
        http.get(f"/v1/datasets/{dataset}")
        assert http.post("/v1/jobs", json={"name": "j", "dataset": "corpus"}).status_code == 201
        assert http.post(f"{MLFLOW}/runs/update", content=b"{").status_code == 400
    recorded = recorded_in(local)
    assert {(call["user"], call["client"], call["roles"][0]) for call in recorded} == {("local", "127.0.0.1", "ml-admin")}
    logged = [call for call in recorded if call["route"].endswith("/log-metric")]
    assert sum(call["count"] for call in logged) == 5 and {tuple(call["objects"]) for call in logged} == {(f"run:{run}",)}
    others = [(call["route"], call["status"], call["objects"]) for call in recorded if call not in logged]
    assert others == [
        (f"{MLFLOW}/runs/create", 200, ["experiment:0"]),
        ("/v1/datasets", 201, []),
        ("/v1/datasets/{dataset_id}/preview", 200, [f"dataset:{dataset}"]),
        ("/v1/jobs", 201, ["registered model:j"]),
        (f"{MLFLOW}/runs/update", 400, []),
    ]


INTO_A_DATASET: dict[tuple[str, str], dict[str, Any]] = {
    ("GET", "/v1/datasets/{dataset_id}/preview"): {},
    ("GET", "/v1/datasets/{dataset_id}/download"): {},
    ("GET", "/v1/datasets/{dataset_id}/diff"): {"params": {"against": "d@1"}},
    ("GET", "/v1/datasets/{dataset_id}/lineage"): {},
    ("GET", "/v1/datasets/{dataset_id}/checks"): {},
    ("GET", "/v1/datasets/{dataset_id}/report"): {},
    ("GET", "/v1/datasets/trace"): {"params": {"match": "lamp"}},
    ("POST", "/v1/datasets/trace"): {"json": {"match": "lamp"}},
}
"""Parameters of each route. `test_features` covers features, which are counted."""


@pytest.mark.requirement("B8")
def test_every_route_that_reads_dataset_contents_is_audited(local: FastAPI, tmp_path: Path) -> None:
    """The calls succeed: a refusal is audited in any case."""
    reads = {("GET", route.template) for route in Routes(local).all if route.method == "GET"}
    assert {each for each in reads if each[1].startswith("/v1/datasets/{dataset_id}/")} <= INTO_A_DATASET.keys()
    with asking(local) as http:
        dataset = create(http)
        validate(local.state.settings, dataset, tmp_path)
        for (method, template), asked in INTO_A_DATASET.items():
            path = template.format(dataset_id=dataset["id"])
            assert http.request(method, path, **asked).status_code == 200, path
    opened = [(call["method"], call["route"], call["status"], call["objects"]) for call in recorded_in(local)[1:]]
    whose = {path: [] if path.endswith("/trace") else [f"dataset:{dataset['id']}"] for _, path in INTO_A_DATASET}
    assert opened == [(method, path, 200, whose[path]) for method, path in INTO_A_DATASET]


def test_change_failing_with_unexpected_error_is_audited(local: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("nobody expects this")

    with asking(local) as http:
        run = http.post(f"{MLFLOW}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
        monkeypatch.setattr(local.state.tracking.runs, "update", broken)
        failed = http.post(f"{MLFLOW}/runs/update", json={"run_id": run})
        assert (failed.status_code, failed.json()["error_code"]) == (500, "INTERNAL_ERROR")
        assert (failed.headers["x-content-type-options"], failed.headers["x-frame-options"]) == ("nosniff", "SAMEORIGIN")
    [_, updated] = recorded_in(local)
    assert (updated["route"], updated["status"], updated["objects"]) == (f"{MLFLOW}/runs/update", 500, [f"run:{run}"])


@pytest.mark.parametrize(("error", "status"), [(ValueError("x"), 500), (OperationalError("", {}, ValueError("x")), 503)])
def test_call_failing_during_authorization_is_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    """Neither caller nor object was recorded when the permission could not be determined."""

    def broken(*_: object, **__: object) -> None:
        raise error

    with Iam() as iam:
        app = create_app(migrated(tmp_path, HANZO_ML_AUTH_VERIFY_TOKENS="true", HANZO_ML_AUTH_IAM_URL=iam.url))
        headers = {"Authorization": f"Bearer {iam.token('ann', 'default', 'ml-admin')}"}
        with asking(app) as http:
            monkeypatch.setattr("api.middleware.access_control.check_ownership", broken)
            failed = http.post(f"{MLFLOW}/runs/update", json={"run_id": "r"}, headers=headers)
            read = http.get("/v1/runs/r", headers=headers)
    assert (failed.status_code, read.status_code) == (status, status)
    [recorded] = recorded_in(app)
    assert (recorded["user"], recorded["route"], recorded["status"]) == ("ann", f"{MLFLOW}/runs/update", status)


def counted_in(app: FastAPI) -> dict[str, int]:
    """Return the counts of every route, from the database and the log."""
    database = Database(app.state.settings.database_url)
    with database.write() as connection:
        record_calls(connection, flush_counts(connection, now_ms(), 0))
        found: Counter[str] = Counter()
        for each in list_calls(connection, "default", limit=1000):
            found[each.payload["route"].rpartition("/")[2]] += each.payload["count"]
    database.close()
    return found


def test_logging_calls_are_counted_before_their_response_is_sent(local: FastAPI) -> None:
    """On both paths and through `/v1`: killing the server afterwards loses no count."""
    with asking(local) as http:
        run = http.post(f"{MLFLOW}/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
        point = {"key": "loss", "value": 1.0, "timestamp": 1}
        logging: list[tuple[str, dict[str, Any]]] = [
            (f"{MLFLOW}/runs/log-metric", {"run_id": run, **point, "step": 0}),
            (f"{MLFLOW}/runs/log-metric", {"run_id": run, **point, "step": 1}),
            (f"{MLFLOW}/runs/log-metric", {"run_id": run, **point, "step": "2"}),
            (f"{MLFLOW}/runs/log-batch", {"run_id": run, "metrics": [point], "tags": [{"key": "a", "value": "b"}]}),
            (f"{MLFLOW}/runs/log-parameter", {"run_id": run, "key": "p", "value": "v"}),
            (f"{MLFLOW}/runs/set-tag", {"run_id": run, "key": "t", "value": "v"}),
            (f"{MLFLOW}/runs/delete-tag", {"run_id": run, "key": "t"}),
            (f"/v1/runs/{run}/metrics", {"metrics": [{"key": "k", "value": 1}]}),
            (f"/v1/runs/{run}/params", {"params": {"other": "v"}}),
        ]
        expected: Counter[str] = Counter(create=1)
        for path, body in logging:
            assert http.post(path, json=body).is_success, path
            expected[path.rpartition("/")[2]] += 1
            assert counted_in(local) == expected
        assert http.post(f"{MLFLOW}/runs/log-metric", json={"run_id": "no run", **point}).status_code == 404
    assert counted_in(local) == expected + Counter({"log-metric": 1}), "what was refused is counted, but not waited for"


def test_every_writing_route_is_audited_without_sign_in(local: FastAPI) -> None:
    """Covers new routes by their method, and any response.

    Routes of pods need a program's token, without sign-in too. Replicas of the engine report their state every 5 s,
    which changes nothing that a user has.
    """
    changing = {
        (route.method, route.template)
        for route in Routes(local).all
        if route.method not in ("GET", "HEAD") and not READS_BY_POST.search(route.template)
        if "/programs/" not in route.template and not route.template.startswith("/v1/engine/")
    }
    with asking(local) as http:
        for method, template in changing:
            http.request(method, re.sub(r"\{[^}]*\}", "nothing", template), json={})
    assert len(changing) > 60
    assert changing - {(call["method"], call["route"]) for call in recorded_in(local)} == set()


def test_concurrent_audit_rows_share_a_transaction(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/a.db")
    database.migrate()
    commits = 0

    @event.listens_for(database.engine, "commit")
    def count(_: object) -> None:
        nonlocal commits
        commits += 1

    trail = AuditLog(database)
    calls = [AuditedCall("u", "o", (), "POST", f"/{number}", (), 200, "c", 2.0) for number in range(50)]

    async def record_all() -> None:
        await asyncio.gather(*(trail.record(call) for call in calls))

    asyncio.run(record_all())
    with database.read() as connection:
        assert [row.payload["route"] for row in list_calls(connection, "o")] == [call.route for call in calls]
    assert commits <= 3
    database.close()


def test_audit_rows_survive_a_brief_database_outage(tmp_path: Path) -> None:
    """A response waits for its audit row; a count is kept until the next write."""
    database = Database(f"sqlite:///{tmp_path}/a.db")
    trail = AuditLog(database)  # without tables: every write fails
    change, logged = (AuditedCall("u", "o", (), "POST", route, (), 200, "c", 2.0) for route in ("/change", "/log"))

    async def call() -> None:
        trail.count(logged)
        await trail.flush()
        answer = asyncio.create_task(trail.record(change))
        await asyncio.sleep(0.3)
        assert not answer.done()
        await asyncio.to_thread(database.migrate)
        await answer
        await trail.flush(everything=True)

    asyncio.run(call())
    with database.read() as connection:
        assert [row.payload["route"] for row in list_calls(connection, "o")] == ["/change", "/log"]
    database.close()


def test_audit_row_of_a_call_naming_many_objects_is_truncated() -> None:
    """All names were kept in memory for as long as such calls were counted."""
    named = frozenset(Reference(ObjectKind.RUN, f"{number:05}") for number in range(50_000))
    call = Call("POST", "/x", "127.0.0.1", 0.0, references=named)
    assert call.audit_row(404).objects == tuple(f"run:{number:05}" for number in range(MAX_OBJECTS))
