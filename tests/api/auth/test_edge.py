"""Around authorization: names, origins, sizes, headers, Prometheus, and a stock client."""

from pathlib import Path

import httpx
import mlflow
import pytest
from prometheus_client.parser import text_string_to_metric_families

from resources.compute.local.capacity import count_by_type, installed_gpus
from tests.api.auth.conftest import MLFLOW, SignedIn
from tests.api.auth.iam import Key

NAMES = {
    "hanzo_ml_jobs_total": {"type", "status", "org"},
    "hanzo_ml_gpu_hours_total": {"gpu_type", "org"},
    "hanzo_ml_datasets_created_total": {"org"},
    "hanzo_ml_models_registered_total": {"org"},
    "hanzo_ml_job_duration_seconds": {"type"},
    "hanzo_ml_api_request_duration_seconds": {"endpoint"},
    "hanzo_ml_jobs_running": {"type", "org"},
    "hanzo_ml_gpus_allocated": {"gpu_type"},
    "hanzo_ml_gpus_available": {"gpu_type"},
    "hanzo_ml_queue_depth": {"org", "priority"},
    "hanzo_ml_storage_bytes": {"bucket"},
}
"""The specification's, literally."""


@pytest.mark.requirement("V3", "V4", "V5", "V6", "Y3")
def test_prometheus_metrics_have_the_specified_names(signed_in: SignedIn) -> None:
    signed_in.acme.viewer.get(f"/v1/runs/{signed_in.acme.ids['run']}")
    signed_in.acme.viewer.get("/no/such/route")
    page = httpx.get(signed_in.metrics_url, trust_env=False)
    assert page.status_code == 200 and page.headers["x-content-type-options"] == "nosniff"
    found: dict[str, set[str]] = {}
    values: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(page.text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = set()
        for sample in family.samples:
            found[name] |= sample.labels.keys() - {"le"}
            values[(sample.name, *(sample.labels[label] for label in sorted(sample.labels)))] = sample.value
    assert NAMES.keys() == found.keys()
    for name, labels in found.items():
        assert labels <= NAMES[name], name
        assert labels == NAMES[name] or name in {
            "hanzo_ml_gpu_hours_total",
            "hanzo_ml_gpus_allocated",
            "hanzo_ml_job_duration_seconds",
            "hanzo_ml_jobs_running",
        }, name
    # The server is shared by the session: other tests submit jobs too.
    queued = [job for job in signed_in.rival.admin.get("/v1/jobs").json()["jobs"] if job["status"] == "queued"]
    assert queued and values["hanzo_ml_jobs_total", "rival", "queued", "training"] == len(queued)
    assert values["hanzo_ml_datasets_created_total", "rival"] == 1
    assert values["hanzo_ml_models_registered_total", "rival"] >= 1
    assert values["hanzo_ml_queue_depth", "rival", "medium"] == len(queued)
    there = count_by_type(installed_gpus(), signed_in.server.settings.scheduler.gpu_types)
    assert {name: values["hanzo_ml_gpus_available", name] for name in there} == there, "no job runs: all are free"
    assert values["hanzo_ml_storage_bytes", "hanzo-ml-datasets"] > 0
    endpoints = {labels[1] for labels in values if labels[0] == "hanzo_ml_api_request_duration_seconds_count"}
    assert {"/v1/runs/{run_id}", "unmatched"} <= endpoints
    assert not any(signed_in.acme.ids["run"] in endpoint for endpoint in endpoints)


@pytest.mark.requirement("V2", "Z21")
def test_metrics_port_serves_only_the_metrics_page_and_only_to_known_hosts(signed_in: SignedIn) -> None:
    other = httpx.URL(signed_in.metrics_url)
    assert httpx.get(other.copy_with(path="/"), trust_env=False).status_code == 404
    assert httpx.get(other, headers={"Host": "evil.example"}, trust_env=False).status_code == 403
    assert httpx.get(f"{signed_in.server.url}/metrics", trust_env=False).status_code == 401


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}])
def test_foreign_host_or_origin_is_refused_even_with_a_token(signed_in: SignedIn, headers: dict[str, str]) -> None:
    answer = signed_in.acme.admin.get("/v1/jobs", headers=headers)
    assert answer.status_code == 403 and "job-of-acme" not in answer.text
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "SAMEORIGIN"
    begins = "Invalid Host header" if "Host" in headers else "Cross-origin request blocked"
    assert answer.json()["message"].startswith(f"{begins}: it does not name this server. Use ")


def test_allowed_host_name_is_served(signed_in: SignedIn) -> None:
    assert signed_in.acme.admin.get("/v1/jobs", headers={"Host": "ml.hanzo.svc:8057"}).status_code == 200
    assert httpx.get(f"{signed_in.server.url}/alive", headers={"Host": "10.0.0.7:8057"}, trust_env=False).status_code == 200


@pytest.mark.parametrize("path", ["/v1/runs/{run}", "/v1/jobs", "/no/such/route", "/alive", "/openapi.json"])
def test_every_response_has_nosniff_and_frame_headers_and_no_cors(signed_in: SignedIn, path: str) -> None:
    answer = signed_in.acme.admin.get(path.replace("{run}", signed_in.acme.ids["run"]))
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
    assert answer.headers.get_list("x-frame-options") == ["SAMEORIGIN"]
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_uploaded_html_is_served_as_sandboxed_attachment(signed_in: SignedIn) -> None:
    path = signed_in.acme.ids["file"].replace("notes.txt", "page.html")
    signed_in.acme.admin.put(f"/api/2.0/mlflow-artifacts/artifacts/{path}", content=b"<script>1</script>")
    headers = signed_in.acme.admin.get(f"/api/2.0/mlflow-artifacts/artifacts/{path}").headers
    assert "sandbox" in headers["content-security-policy"] and headers["content-disposition"].startswith("attachment")
    assert headers.get_list("x-content-type-options") == ["nosniff"]


@pytest.mark.requirement("X9")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["runs/update", "runs/log-batch", "runs/log-metric"])
def test_a_body_that_is_too_large_is_refused(signed_in: SignedIn, path: str, streamed: bool) -> None:
    body = b'{"run_id": "' + b"x" * 200_000 + b'"}'
    content = iter([body[:100], body[100:]]) if streamed else body
    headers = {"Content-Type": "application/json"}
    answer = signed_in.acme.admin.post(f"{MLFLOW}/{path}", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error_code"]) == (413, "INVALID_PARAMETER_VALUE"), answer.text


def test_artifact_upload_may_exceed_the_json_body_limit(signed_in: SignedIn) -> None:
    path = signed_in.acme.ids["file"].replace("notes.txt", "large.bin")
    url = f"/api/2.0/mlflow-artifacts/artifacts/{path}"
    assert signed_in.acme.admin.put(url, content=iter([b"x" * 200_000] * 3)).status_code == 200
    assert len(signed_in.acme.admin.get(url).content) == 600_000


@pytest.mark.requirement("F7")
def test_stock_mlflow_client_needs_only_a_token(
    signed_in: SignedIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The specification's example, with no experiment named."""
    token = signed_in.iam.token("gina", "acme", "ml-researcher")
    signed_in.tokens.append(token)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    mlflow.set_tracking_uri(signed_in.server.url)
    with mlflow.start_run() as run:
        mlflow.log_param("learning_rate", 1e-4)
        mlflow.log_metric("train_loss", 0.5, step=1)
        (tmp_path / "best_model.pt").write_bytes(b"weights")
        mlflow.log_artifact(str(tmp_path / "best_model.pt"))
    found = mlflow.MlflowClient().get_run(run.info.run_id)
    assert found.data.metrics == {"train_loss": 0.5} and found.info.user_id == "gina"
    with pytest.raises(mlflow.MlflowException, match="not found"):
        mlflow.MlflowClient().get_run(signed_in.rival.ids["run"])
    files = mlflow.MlflowClient().list_artifacts(run.info.run_id)
    assert [file.path for file in files] == ["best_model.pt"]


def test_rotated_signing_key_is_accepted_without_restart(signed_in: SignedIn) -> None:
    new = Key("rotated", "RS256")
    token = new.sign(signed_in.iam.claims("hans", "acme", "ml-viewer"))
    signed_in.tokens.append(token)
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{signed_in.server.url}/v1/jobs", headers=headers, trust_env=False).status_code == 401
    signed_in.iam.keys.append(new)
    assert httpx.get(f"{signed_in.server.url}/v1/jobs", headers=headers, trust_env=False).status_code == 200
