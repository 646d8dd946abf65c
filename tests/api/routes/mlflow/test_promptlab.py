"""A tested prompt becomes a run, as in MLflow 3.17: required fields and stored data."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

PATH = "/ajax-api/2.0/mlflow/runs/create-promptlab-run"
PROMPT: dict[str, Any] = {
    "experiment_id": "0",
    "prompt_template": "Greet {{ who }} in {{ words }} words",
    "prompt_parameters": [{"key": "who", "value": "the crew"}, {"key": "words", "value": 3}],
    "model_route": "helm",
    "model_input": "Greet the crew in 3 words",
    "mlflow_version": "3.17.2",
}


def test_promptlab_creates_a_run_with_its_evaluation_table(http: TestClient) -> None:
    more = {
        "run_name": "greeting",
        "tags": [{"key": "t", "value": "v"}],
        "model_parameters": [{"key": "temperature", "value": 0.1}],
        "model_output": "Ahoy, brave crew",
        "model_output_parameters": [{"key": "tokens", "value": 4}],
        "user_id": "jane",
        "start_time": 12,
    }
    run = http.post(PATH, json={**PROMPT, **more}).json()["run"]
    run_id, info = run["info"]["run_id"], run["info"]
    assert (info["status"], info["run_name"], info["user_id"], info["start_time"]) == ("FINISHED", "greeting", "jane", 12)
    assert info["end_time"] > 12
    assert {pair["key"]: pair["value"] for pair in run["data"]["params"]} == {
        "model_route": "helm",
        "prompt_template": "Greet {{ who }} in {{ words }} words",
        "temperature": "0.1",
    }
    assert {pair["key"]: pair["value"] for pair in run["data"]["tags"]} == {
        "t": "v",
        "mlflow.loggedArtifacts": '[{"path": "eval_results_table.json", "type": "table"}]',
        "mlflow.runSourceType": "PROMPT_ENGINEERING",
        "mlflow.runName": "greeting",
    }
    table = http.get("/get-artifact", params={"run_id": run_id, "path": "eval_results_table.json"}).json()
    assert table == {
        "columns": ["who", "words", "prompt", "output", "tokens"],
        "data": [["the crew", "3", "Greet the crew in 3 words", "Ahoy, brave crew", "4"]],
    }
    assert http.get("/api/2.0/mlflow/runs/get", params={"run_id": run_id}).json()["run"] == run
    got = http.get("/ajax-api/2.0/mlflow/artifacts/get", params={"run_id": run_id, "path": "eval_results_table.json"})
    assert got.json() == table


@pytest.mark.parametrize("missing", list(PROMPT))
def test_first_missing_field_is_named_in_mlflows_order(http: TestClient, missing: str) -> None:
    before = list(PROMPT)[: list(PROMPT).index(missing)]
    for body in ({name: PROMPT[name] for name in before}, {**PROMPT, missing: type(PROMPT[missing])()}):
        answer = http.post(PATH, json=body)
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
        assert answer.json()["message"] == f"CreatePromptlabRun request must specify {missing}."
    assert http.post("/api/2.0/mlflow/runs/search", json={"experiment_ids": ["0"]}).json() == {"runs": []}


def test_run_is_marked_failed_when_its_table_cannot_be_stored(breakable: TestClient) -> None:
    (breakable.app.state.settings.home / "objects").mkdir(exist_ok=True)  # type: ignore[attr-defined]
    bucket = breakable.app.state.settings.home / "objects" / "hanzo-ml-checkpoints"  # type: ignore[attr-defined]
    bucket.write_text("no folder")
    assert breakable.post(PATH, json=PROMPT).status_code >= 500
    [run] = breakable.post("/api/2.0/mlflow/runs/search", json={"experiment_ids": ["0"]}).json()["runs"]
    assert run["info"]["status"] == "FAILED"
    assert json.loads(run["data"]["tags"][0]["value"])[0]["path"] == "eval_results_table.json"
