"""An installation of commit 0191424, continued by this code without loss or repeated work.

Only the command line, HTTP and stored files are used, as an installed system would see the upgrade.
"""

import json
import re
import sqlite3
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.local_stack import LocalStack, wait_until

STATE = Path(__file__).parents[1] / "fixtures" / "state_0191424"
FACTS = json.loads((STATE / "facts.json").read_text())
JOBS: dict[str, str] = FACTS["jobs"]
MODEL: str = FACTS["model"]
CODE_ONLY = {"git commit", "uncommitted changes", "requirements.lock"}
"""Environment differences that by themselves change no number."""


def restore(home: Path) -> Path:
    """Unpack the state, and replace its original folder where a document names it."""
    with tarfile.open(STATE / "state.tar.xz") as tar:
        tar.extractall(home, filter="data")
    for pattern in ("engine/*.json", "jobs/*/*/*.json", "dagster/dagster.yaml"):
        for path in home.glob(pattern):
            path.write_text(path.read_text().replace(FACTS["home"], str(home)))
    return home


def rows(database: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


@dataclass(frozen=True)
class Upgraded:
    """A stack of this code on the restored state, with its earlier Dagster runs."""

    stack: LocalStack
    dagster_runs: frozenset[str]


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:
    home = restore(tmp_path_factory.mktemp("state"))
    runs = frozenset(run for (run,) in rows(home / "dagster" / "history" / "runs.db", "SELECT run_id FROM runs"))
    stack = LocalStack(home)
    stack.hanzo_ml("up")
    try:
        yield Upgraded(stack, runs)
    finally:
        stack.hanzo_ml("down", check=False)


@pytest.fixture
def stack(upgraded: Upgraded) -> LocalStack:
    return upgraded.stack


def graphql(stack: LocalStack, query: str, **variables: Any) -> Any:
    body = {"query": query, "variables": variables}
    answer = stack.http.post(stack.url("HANZO_ML_DAGSTER_PORT") + "/graphql", json=body).json()
    assert "errors" not in answer, answer
    return answer["data"]


def stopped_sensors(stack: LocalStack) -> list[str]:
    query = "{ repositoriesOrError { ... on RepositoryConnection { nodes { sensors { name sensorState { status } } } } } }"
    (repository,) = graphql(stack, query)["repositoriesOrError"]["nodes"]
    return [sensor["name"] for sensor in repository["sensors"] if sensor["sensorState"]["status"] == "STOPPED"]


def tags_of_runs(stack: LocalStack) -> dict[str, dict[str, str]]:
    """Return the tags of every Dagster run; its partition is the id of a job."""
    query = "{ runsOrError(limit: 1000) { ... on Runs { results { runId tags { key value } } } } }"
    found = graphql(stack, query)["runsOrError"]["results"]
    return {run["runId"]: {tag["key"]: tag["value"] for tag in run["tags"]} for run in found}


def version(stack: LocalStack, number: int) -> dict[str, Any]:
    return dict(stack.get(f"/v1/models/{MODEL}/versions/{number}"))


def ask(stack: LocalStack) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What colour has door number 3?"}], "max_tokens": 4}
    return stack.http.post(stack.url("HANZO_ML_ENGINE_PORT") + "/v1/chat/completions", json=body)


def test_migrations_keep_every_row(tmp_path: Path) -> None:
    home = restore(tmp_path)
    tables = [name for (name,) in rows(home / "hanzo-ml.db", "SELECT name FROM sqlite_master WHERE type = 'table'")]
    kept = [name for name in tables if not name.startswith(("sqlite_", "alembic_"))]
    before = {name: rows(home / "hanzo-ml.db", f'SELECT count(*) FROM "{name}"') for name in kept}
    assert before["jobs"] != [(0,)] and before["events"] != [(0,)]
    LocalStack(home).hanzo_ml("server", "migrate")
    assert {name: rows(home / "hanzo-ml.db", f'SELECT count(*) FROM "{name}"') for name in kept} == before


@pytest.mark.slow
def test_up_starts_every_service_on_the_old_state(stack: LocalStack) -> None:
    shown = stack.hanzo_ml("status").stdout
    assert "not running" not in shown and "stuck" not in shown and shown.count("running") >= 5


@pytest.mark.slow
def test_served_version_answers_and_is_proved(stack: LocalStack) -> None:
    wait_until("the model to be served again", lambda: ask(stack).status_code == 200)
    assert ask(stack).headers["X-Hanzo-Model-Version"] == "1"
    assert version(stack, 1)["stage"] == "production"
    proof = json.loads(stack.hanzo_ml("model", "prove", MODEL, "1", "--json").stdout)
    assert proof["ok"], proof["broken"]


@pytest.mark.slow
def test_ended_jobs_keep_status_reason_and_metrics(stack: LocalStack) -> None:
    statuses = {name: stack.get(f"/v1/jobs/{JOBS[name]}")["status"] for name in ("finished", "failed", "cancelled")}
    assert statuses == {"finished": "completed", "failed": "failed", "cancelled": "cancelled"}
    assert "there is no such column: price" in stack.get(f"/v1/jobs/{JOBS['failed']}")["reason"]
    assert "there is no such column: price" in stack.hanzo_ml("job", "logs", JOBS["failed"]).stdout
    assert [step for step, _ in stack.losses(JOBS["finished"])] == list(range(1, 7))
    (dataset,) = stack.get("/v1/datasets", name=FACTS["dataset"])["datasets"]
    assert dataset["num_records"] == sum(part["num_records"] for part in dataset["splits"].values()) == 80


@pytest.mark.slow
def test_version_quarantined_before_is_still_refused(stack: LocalStack) -> None:
    promote = ("model", "promote", "--name", FACTS["quarantined"], "--version", "1", "--stage", "production")
    refused = stack.hanzo_ml(*promote, check=False)
    assert refused.returncode == 1 and "quarantined" in refused.stderr


@pytest.mark.slow
def test_export_interrupted_by_down_is_retried_and_fails_for_its_old_reason(stack: LocalStack) -> None:
    """Its program exited with code 78, and its run was killed before reading that."""
    job = stack.get(f"/v1/models/{FACTS['quarantined']}/versions/1")["run_id"]
    assert "not finite" in stack.wait_for("evaluation.failed", job)["payload"]["error"]


@pytest.mark.slow
def test_finished_run_is_replayed(stack: LocalStack) -> None:
    """Bit for bit, unless this environment rounds differently: then the verdict names the differences."""
    replay = stack.hanzo_ml("run", "replay", JOBS["finished"], "--json", check=False)
    assert replay.stdout, replay.stderr
    verdict = json.loads(replay.stdout)
    assert (verdict["run"], verdict["steps"], verdict["unrepeated"]) == (JOBS["finished"], 6, [])
    differences = {each["what"] for each in verdict["environment"]}
    assert verdict["equal"] or differences - CODE_ONLY, verdict


@pytest.mark.slow
def test_interrupted_command_resumes_by_its_old_exit_document(stack: LocalStack) -> None:
    stack.wait_for("job.completed", JOBS["interrupted"])
    log = stack.hanzo_ml("job", "logs", JOBS["interrupted"]).stdout
    assert [line for line in log.splitlines() if line in ("started", "resumed")] == ["started", "resumed"]
    left = stack.path(stack.get(f"/v1/jobs/{JOBS['interrupted']}")["artifacts"]["checkpoints"]["uri"])
    assert (left / "starts").read_text() == "xx"


@pytest.mark.slow
def test_cancelled_training_resumes_from_its_checkpoint(stack: LocalStack) -> None:
    job = JOBS["cancelled"]
    stack.hanzo_ml("job", "resume", job)
    stack.wait_for("job.completed", job)
    assert "resuming from checkpoint 2 of 40" in stack.hanzo_ml("job", "logs", job).stdout
    assert [step for step, _ in stack.losses(job)] == list(range(1, 41))


@pytest.mark.slow
def test_queued_job_is_run_promoted_and_served(stack: LocalStack) -> None:
    stack.wait_for("job.completed", JOBS["queued"])
    wait_until("version 2", lambda: len(stack.events("model.exported", key=MODEL)) == 2)
    stack.hanzo_ml("model", "promote", "--name", MODEL, "--version", "2", "--stage", "production")
    wait_until("version 2 to be served", lambda: ask(stack).headers.get("X-Hanzo-Model-Version") == "2")
    assert (version(stack, 1)["stage"], version(stack, 2)["stage"]) == ("archived", "production")
    assert stack.hanzo_ml("model", "prove", MODEL, "2").returncode == 0


RENAMED_FILES = {
    "optimizer.pt": "optimizer.safetensors",
    "scheduler.pt": "scheduler.json",
    "rng_state.pth": "rng_state.safetensors",
    "training_args.bin": "training_args.json",
}
"""Files of checkpoints that were pickles."""


@pytest.mark.slow
def test_new_job_writes_where_the_old_one_did(stack: LocalStack) -> None:
    """URIs are stored elsewhere: objects of equal work have equal locations."""
    wait_until("version 2", lambda: len(stack.events("model.exported", key=MODEL)) == 2)
    old = places(stack, JOBS["finished"], 1)
    before = {re.sub(r"[^/]+$", lambda found: RENAMED_FILES.get(found[0], found[0]), place) for place in old}
    assert len(before) > 10
    assert places(stack, JOBS["queued"], 2) == before


@pytest.mark.slow
def test_sensors_ask_for_runs_under_the_same_keys(stack: LocalStack) -> None:
    """Dagster starts a run key once: another key would repeat finished work."""
    wait_until("version 2", lambda: len(stack.events("model.exported", key=MODEL)) == 2)
    keys = {job: run_keys(stack, job) for job in (JOBS["finished"], JOBS["queued"])}
    assert len(keys[JOBS["finished"]]) > 1
    assert keys[JOBS["queued"]] == keys[JOBS["finished"]]


def run_keys(stack: LocalStack, job: str) -> set[str]:
    runs = [tags for tags in tags_of_runs(stack).values() if tags.get("dagster/partition") == job]
    keys = {re.sub(r"-\d+$", "-SEQUENCE", tags.get("dagster/run_key", "").replace(job, "JOB")) for tags in runs}
    return {key for key in keys if not key.startswith("retry-")}


def places(stack: LocalStack, job: str, number: int) -> set[str]:
    """Return the keys of a job's objects and the URIs of its version's artifacts.

    Parts that differ from job to job are left out. Metrics that were not sent when a checkpoint was written are stored
    with it: their number depends on the load of the machine.
    """
    objects = stack.home / "objects"
    keys = [path.relative_to(objects).as_posix() for path in objects.rglob("*") if path.is_file()]
    uris = [artifact["path"] for artifact in version(stack, number)["artifacts"].values()]
    named = {uri.replace(job, "JOB") for uri in (*keys, *uris) if job in uri or uri in uris}
    return {re.sub(r"/v?\d+/", "/NUMBER/", uri) for uri in named if "/pending_metrics-" not in uri}


@pytest.mark.slow
def test_sensors_keep_their_state_and_start_nothing_twice(upgraded: Upgraded) -> None:
    """The last test: by now every sensor has processed the restored state."""
    stack = upgraded.stack
    wait_until("the end of the queued job", lambda: len(stack.events("model.exported", key=MODEL)) == 2)
    assert stopped_sensors(stack) == [FACTS["stopped_sensor"]]
    runs = tags_of_runs(stack)
    assert runs.keys() > upgraded.dagster_runs
    new = {tags.get("dagster/partition") for run, tags in runs.items() if run not in upgraded.dagster_runs}
    assert new >= {JOBS["queued"], JOBS["interrupted"]}
    assert new.isdisjoint({JOBS["finished"], JOBS["failed"]})
    once = ("job.submitted", "job.completed", "job.failed", "evaluation.completed")
    counts = Counter((event["type"], event["key"]) for event in stack.events(*once))
    assert {each: count for each, count in counts.items() if count > 1} == {}
    assert len(stack.events("dataset.split")) == 1
    assert len(stack.events("model.registered", key=MODEL)) == 2
