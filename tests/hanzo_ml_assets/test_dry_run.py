"""`hanzo-ml job submit --dry-run`: the rendered submission, from the state folder alone.

It writes nothing.
"""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hanzo_ml.cli import main as command_line
from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.dry_run import training as dry_run
from hanzo_ml_assets.dry_run.__main__ import main
from hanzo_ml_assets.training_plan import make_training_plan, training_job
from resources.compute.kubernetes.job_manifest import render
from resources.jobs.submission import NewJob
from resources.metadata.job_record import UNSUBMITTED
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from tests.support.assets.dry_run_home import ASSISTANT, add, database, home

__all__ = ["home"]

ROOT = Path(__file__).resolve().parents[2]
ONE_40GB = {"hardware": {"gpus": 1, "gpu_type": "nvidia-a100-40gb"}, "distributed": None}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def printed(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the module in this process, as starting Python costs most of the time."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"job": document, "note": "No server answers."})))
    main()
    return capsys.readouterr().out


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    # The module sets it for its process, which here is the test's.
    monkeypatch.setenv("GIT_OPTIONAL_LOCKS", "0")
    yield lambda **changed: printed(ASSISTANT | changed, monkeypatch, capsys)


def test_dry_run_prints_the_objects_and_writes_nothing(home: Path) -> None:
    before = snapshot(home.parent)
    code = "from hanzo_ml.cli import main; main()"
    arguments = ["job", "submit", "--model", "ellarin-assistant", "--set", "max_steps=7", "--dry-run"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    document, secret, job_set = yaml.safe_load_all(done.stdout)
    assert (document["kind"], secret["kind"], job_set["kind"]) == ("ConfigMap", "Secret", "JobSet")
    assert json.loads(document["data"]["job.json"])["parameters"]["recipe"]["max_steps"] == 7
    assert done.stdout.startswith("# hanzo-ml job submit --dry-run: nothing was submitted")
    assert "# model ellarin-assistant, dataset ellarin@1, recipe smollm2-135m-lora" in done.stdout
    assert snapshot(home.parent) == before


@pytest.mark.requirement("A6", "Z2")
def test_dry_run_renders_the_job_that_a_submission_runs(home: Path, run: Any) -> None:
    changed = {
        "parameters": {
            "max_steps": 5,
            "hardware": {"gpus": 8, "gpu_type": "nvidia-h100-80gb"},
            "distributed": {"gpus_per_node": 8},
        },
        "schedule": {"max_duration": "2h", "preemptible": True, "priority": "high"},
    }
    text = run(**changed)
    control_plane = ControlPlane()
    config = NewJob.model_validate(ASSISTANT | changed).model_dump(mode="json", exclude_none=True)
    control_plane.jobs.submit(name="n", config=config, user="u", organization=DEFAULT_ORGANIZATION, id=UNSUBMITTED)
    plan = make_training_plan(dry_run.load_definition("ellarin-assistant"), UNSUBMITTED, control_plane)
    job = training_job(plan, control_plane)
    control_plane.database.close()
    assert list(yaml.safe_load_all(text)) == render(job, control_plane.settings.scheduler)
    assert (job.schedule.max_duration, job.schedule.priority, job.checkpoint.interval) == ("2h", "high", "20m")


def test_dry_run_output_is_deterministic_and_depends_on_parameters(home: Path, run: Any) -> None:
    text = run()
    assert run() == text
    assert run(parameters={"seed": 7}) != text


def test_settings_choose_the_objects(home: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANZO_ML_SCHEDULER_GANG_BACKEND", "indexed_job")
    monkeypatch.setenv("HANZO_ML_STORAGE_ENDPOINT", "http://minio:9000")
    text = run(parameters={"distributed": {"num_nodes": 2, "gpus_per_node": 8}})
    assert [item["kind"] for item in yaml.safe_load_all(text)] == ["ConfigMap", "Secret", "Service", "Job"]
    assert "cannot reach the object store" not in text and "cannot reach the API at http://127.0.0.1" in text


def test_dry_run_reads_uncheckpointed_sqlite_writes_without_changing_files(home: Path, run: Any) -> None:
    with database() as opened:
        add(opened, "late", split=True)
        before = snapshot(home)
        assert "hanzo-ml.db-wal" in before, "the database must be in use for this test"
        assert "dataset late@1" in run(dataset="late")
        after = snapshot(home)
        memory = "hanzo-ml.db-shm"  # SQLite's shared memory records readers, not written data
        assert after | {memory: b""} == before | {memory: b""}


def test_dry_run_does_not_create_a_missing_state_folder(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path / "none"))
    assert "dataset 'ellarin' has no version yet" in refused(run)
    assert not (tmp_path / "none").exists()


def refused(run: Any, **changed: Any) -> str:
    with pytest.raises(SystemExit) as end:
        run(**changed)
    assert isinstance(end.value.code, str), "a text makes Python print it on standard error and exit with 1"
    assert end.value.code.startswith("error: ") and "\n" not in end.value.code
    return end.value.code


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "nobody"}, "there is no model definition 'nobody': use one of ellarin-assistant, sandbox, or add"),
        ({"recipe": "nothing"}, "unknown recipe 'nothing': use one of smollm2-135m-dpo"),
        ({"parameters": {"max_step": 5}}, "job parameters: unknown key 'max_step'"),
        ({"parameters": {"hardware": {"gpu_type": "abacus"}}}, "unknown gpu_type 'abacus'"),
        ({"priority": "high"}, "job: unknown key 'priority'"),
        ({"dataset": "nowhere"}, "there is no dataset 'nowhere': create it with `hanzo-ml dataset create"),
        ({"dataset": "ellarin@9"}, "there is no dataset 'ellarin@9'"),
        ({"dataset": "whole"}, "dataset whole@1 is not split yet: `hanzo-ml up` splits it"),
        ({"model": "sandbox"}, "a job without a model definition needs a dataset"),
        ({"parameters": {"objective": "orpo"}}, "objective orpo cannot learn from dataset ellarin@1, whose records are "),
        ({"recipe": "zen-7b-full", "parameters": ONE_40GB}, "on each nvidia-a100-40gb: use recipe 'zen-7b-lora'"),
    ],
)
def test_invalid_job_is_refused_in_one_line_with_a_hint(home: Path, run: Any, changed: Any, words: str) -> None:
    with database() as opened:
        add(opened, "whole", split=False)
    before = snapshot(home)
    assert words in refused(run, **changed)
    assert snapshot(home) == before


def test_unreachable_database_is_reported_without_its_password(
    home: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANZO_ML_DATABASE_URL", "postgresql://u:c4n4ry@127.0.0.1:1/d")
    line = refused(run)
    assert "the metadata database can't be read" in line and "c4n4ry" not in line


def test_dry_run_with_json_option_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hanzo-ml", "job", "submit", "--model", "m", "--dry-run", "--json"])
    with pytest.raises(SystemExit) as end:
        command_line()
    assert end.value.code == 1 and "remove --json" in capsys.readouterr().err
