"""A job's program under sign-in, from start to end.

Its only credential is the one that LocalCompute passes to it. With it the program logs to its run what training logs,
across a restart too.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Job, Program, Tracking
from resources.compute.base import Follower, Observation
from resources.compute.local.backend import LocalCompute
from resources.jobs.job_tokens import TOKEN_VARIABLE, JobCredentials
from resources.metadata.database import Database
from tests.api.auth.conftest import MLFLOW, SignedIn, made

ROOT = Path(__file__).resolve().parents[3]
STRANGERS = "the-token-of-whoever-started-the-stack"
PROGRAM = """
import json, os, signal
import hanzo_ml
from hanzo_ml.client.buffer import MetricBuffer
from recipes.runner import main
from recipes.contracts.job import Result

def program(job, store, work):
    tracking, resumes = job.tracking, (work / "killed").exists()
    metrics = MetricBuffer(tracking.uri, tracking.run_id)
    if resumes:
        metrics.skip_until(0)
    for step in range(1, 4) if resumes else range(2):
        metrics.add("train/loss", 1 / (step + 1), step)
    lost = metrics.close(60)
    if not resumes:
        (work / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (work / "config.yaml").write_text("rank: 8")
    hanzo_ml.set_tracking_uri(tracking.uri)
    with hanzo_ml.start_run(run_id=tracking.run_id) as run:
        run.log_params({"lora_rank": 8})
        run.log_metrics({"eval/loss": 0.25}, step=3)
        run.log_artifact("config.yaml", work / "config.yaml")
    return Result(work_digest=job.work_digest, metrics={"lost": float(len(lost) + len(metrics.refused))})

main(program)
"""


@pytest.mark.slow
def test_job_program_logs_to_its_run_with_the_injected_credentials(
    signed_in: SignedIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme, settings = signed_in.acme, signed_in.server.settings
    submitted = made(acme.researcher.post("/v1/jobs", json={"name": "program", "dataset": "corpus"}))["id"]
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text(f"__path__.append({str(ROOT / 'recipes')!r})\n")
    (tmp_path / "recipes" / "prepare.py").write_text(PROGRAM)
    job = Job(
        id=submitted,
        program=Program.PREPARE,
        result_uri=f"s3://hanzo-ml/runs/{submitted}/result.json",
        store=settings.store,
        cache_dir=str(tmp_path / "cache"),
        tracking=Tracking(uri=settings.tracking_uri, run_id=submitted),
    )
    monkeypatch.setenv(TOKEN_VARIABLE, STRANGERS)
    database = Database(settings.database_url)
    lines: list[str] = []
    seen: list[Observation] = []
    compute = LocalCompute(tmp_path / "jobs", source=tmp_path, poll_seconds=0.05, credentials=JobCredentials(database))
    result = compute.run(job, Follower(line=lines.append, phase=seen.append))
    database.close()
    assert (result.metrics["lost"], max(look.attempt for look in seen)) == (0, 2), lines

    run = made(acme.viewer.get(f"{MLFLOW}/runs/get", params={"run_id": submitted}))["run"]
    assert run["info"]["status"] == "FINISHED"
    assert {"key": "lora_rank", "value": "8"} in run["data"]["params"]
    assert {point["key"]: point["value"] for point in run["data"]["metrics"]} == {"train/loss": 0.25, "eval/loss": 0.25}
    asked = {"run_id": submitted, "metric_key": "train/loss"}
    history = made(acme.viewer.get(f"{MLFLOW}/metrics/get-history", params=asked))
    assert [point["step"] for point in history["metrics"]] == [0, 1, 2, 3], "what both attempts logged counts once"
    proxied = f"/api/2.0/mlflow-artifacts/artifacts/{run['info']['experiment_id']}/{submitted}/artifacts/config.yaml"
    assert acme.viewer.get(proxied).text == "rank: 8"
    assert_unwritten(tmp_path, lines)


def assert_unwritten(folder: Path, lines: list[str]) -> None:
    """Assert that a job leaves no token in its files."""
    texts: list[Any] = [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]
    assert not any("hanzo-ml-job-" in text or STRANGERS in text for text in [*texts, json.dumps(lines)])
