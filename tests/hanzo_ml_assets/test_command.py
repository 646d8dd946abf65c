"""From a submitted command to a finished run with its lineage.

The asset runs the program; job and run end with its status.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import dagster as dg
import pytest

from hanzo_ml_assets.command import COMMAND_KEY, COMMAND_PARTITIONS
from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definitions import definitions
from recipes.contracts.command_job import CommandJob
from recipes.storage.manifest import Artifact
from resources.compute.local.leases import SLOT
from resources.datasets.deletion import delete_version
from resources.errors import HanzoError
from resources.ingest.version_creation import create_version
from resources.jobs.command import submit_command
from resources.jobs.resume import Wish, resume_job
from resources.lineage.dataset_lineage import read_lineage
from resources.lineage.edges import find_artifact, parent_digests
from resources.lineage.trace import Tracer, walk_nodes
from resources.metadata.field_rules import COMMIT_TAG
from resources.metadata.jobs import JobRecord
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking.run_inputs import load_inputs
from resources.metadata.tracking.run_search import RunSearch
from resources.metadata.tracking.runs import Runs
from resources.stack.detached_process import lock_folder
from tests.api.waiting import wait_for
from tests.support.assets.control_plane import isolated_plane


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    with isolated_plane(tmp_path / "home", monkeypatch) as plane:
        yield plane


def submit(plane: ControlPlane, script: str, **keys: Any) -> JobRecord:
    document = {"name": "mine", "command": ["python", "main.py"], "files": {"main.py": script}, **keys}
    return submit_command(plane.database, plane.store, CommandJob.model_validate(document), "ann", "default")


def materialize(job: JobRecord) -> dg.ExecuteInProcessResult:
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(COMMAND_PARTITIONS, [job.id])
        graph = definitions().resolve_implicit_global_asset_job_def()
        return graph.execute_in_process(
            instance=instance, asset_selection=[dg.AssetKey(COMMAND_KEY)], partition_key=job.id, raise_on_error=False
        )


def ended(plane: ControlPlane, job: JobRecord) -> tuple[JobRecord, str]:
    """Return the job, and the status of its run."""
    return plane.jobs.read(job.id), Runs(plane.database).get(job.id).status


def test_completed_command_records_the_lineage_of_its_output(plane: ControlPlane, tmp_path: Path) -> None:
    raw = tmp_path / "d.jsonl"
    raw.write_text('{"text": "She keeps the lamp."}\n')
    version, _ = create_version(plane.database, plane.store, name="d", path=raw, user="u", organization="default")
    script = """
import os, pathlib
(records,) = pathlib.Path(os.environ["HANZO_ML_DATASETS"]).rglob("*.jsonl")
pathlib.Path(os.environ["HANZO_ML_CHECKPOINTS"], "model").write_text(records.read_text())
records.write_text("a script writes where it likes")
"""
    job = submit(plane, script, storage={"datasets": "s3://hanzo-ml/datasets/d/1/"})
    assert materialize(job).success
    found, run = ended(plane, job)
    assert (found.status, run, found.reason) == ("completed", "completed", "")
    left = found.artifact("checkpoints")
    assert "lamp" in plane.store.get_bytes(f"{left.uri}/model").decode()
    with plane.database.read() as connection:
        made_of = parent_digests(connection, left.digest)
        code = find_artifact(connection, made_of["code"])
    assert made_of == {"code": found.artifact("code").digest, "dataset": version.artifact.digest}
    assert isinstance(code, Artifact)
    assert plane.store.fetch(version.artifact, tmp_path / "cache"), "the dataset is what it was"
    with pytest.raises(HanzoError, match="not deleted"):
        delete_version(plane.database, plane.store, version.id, "ann")


def test_command_run_records_data_and_code_and_appears_in_the_data_lineage(plane: ControlPlane, tmp_path: Path) -> None:
    """It had no inputs, params or commit, and its data's lineage lacked it."""
    raw = tmp_path / "d.jsonl"
    raw.write_text('{"text": "She keeps the lamp."}\n')
    version, _ = create_version(plane.database, plane.store, name="d", path=raw, user="u", organization="default")
    keys: dict[str, Any] = {"storage": {"datasets": "s3://hanzo-ml/datasets/d/1/"}, "git_commit": "a" * 40}
    job = submit(plane, "", env={"HF_TOKEN": "hf_s3cr3t"}, **keys)
    RunData(plane.database).log_batch(job.id, params=[("dataset", "the script's own word")])
    assert materialize(job).success and materialize(job).success
    logged = RunSearch(plane.database).get(Runs(plane.database).get(job.id))
    assert logged.params == {"dataset": "the script's own word", "dataset_version": "1", "git_commit": "a" * 40}
    assert logged.tags[COMMIT_TAG] == "a" * 40 and logged.tags["environment/python"]
    with plane.database.read() as connection:
        (read,) = load_inputs(connection, [job.id])[job.id]
        below = [made.name for made in read_lineage(connection, version).made_into]
    assert (read.dataset.name, read.tags) == ("d", {"version": "1", "mlflow.data.context": "training"})
    assert version.artifact.digest.startswith(read.dataset.digest)
    assert below == [f"run {job.id}"]
    record = ended(plane, job)[0].artifact("run")
    assert b"s3cr3t" not in plane.store.get_bytes(f"{record.uri}/command.json")
    traced = Tracer(plane.database, plane.store, "default").trace({"text": "She keeps the lamp."})
    assert [(node.name, node.facts["used"]) for node in walk_nodes(traced.reached) if node.kind == "run"] == [
        (job.id, ["trained on it"])
    ]


def test_failed_command_is_in_the_data_lineage_and_can_be_resumed(plane: ControlPlane, tmp_path: Path) -> None:
    raw = tmp_path / "d.jsonl"
    raw.write_text('{"text": "She keeps the lamp."}\n')
    create_version(plane.database, plane.store, name="d", path=raw, user="u", organization="default")
    job = submit(plane, "raise SystemExit(3)", storage={"datasets": "s3://hanzo-ml/datasets/d/1/"})
    assert not materialize(job).success
    traced = Tracer(plane.database, plane.store, "default").trace({"text": "She keeps the lamp."})
    assert [node.facts["status"] for node in walk_nodes(traced.reached) if node.kind == "run"] == ["failed"]
    assert resume_job(plane.database, plane.store, job.id, Wish(), "ann").status == "queued"


def test_command_waiting_for_a_free_slot_shows_the_reason(plane: ControlPlane) -> None:
    """A program whose worker was killed keeps its slot, and Dagster starts the next."""
    job = submit(plane, "print(1)")
    place = plane.settings.home / "gpus" / f"{SLOT}0"
    place.mkdir(parents=True)
    waits: list[JobRecord] = []

    def wait_and_let_go() -> None:
        with taken:
            wait_for(lambda: bool(plane.jobs.read(job.id).reason))
            waits.append(plane.jobs.read(job.id))

    with ExitStack() as taken:
        assert taken.enter_context(lock_folder(place)) is not None
        other = Thread(target=wait_and_let_go)
        other.start()
        assert materialize(job).success
        other.join()
    (seen,) = waits
    assert (seen.status, seen.reason) == ("running", "waits for its turn: 1 of at most 1 job on this machine run")
    done, _ = ended(plane, job)
    assert (done.status, done.reason) == ("completed", "")


def test_script_error_fails_job_and_run_with_its_message(plane: ControlPlane) -> None:
    job = submit(plane, "raise ValueError('no such column')")
    assert not materialize(job).success
    found, run = ended(plane, job)
    assert (found.status, run) == ("failed", "failed")
    assert "exited with 1: ValueError: no such column" in found.reason and "\n" not in found.reason


def test_multi_node_command_on_one_machine_fails_with_a_hint(plane: ControlPlane) -> None:
    shape = {"strategy": "fsdp", "num_nodes": 4, "gpus_per_node": 8}
    job = submit(plane, "", distributed=shape, storage={"datasets": "s3://hanzo-ml/datasets/finance-corpus-v3/7/"})
    assert not materialize(job).success
    found, run = ended(plane, job)
    assert (found.status, run) == ("failed", "failed")
    assert found.reason == "the job asks for 4 nodes, this machine is one: set distributed.num_nodes to 1"


def test_command_with_a_missing_dataset_fails_naming_it(plane: ControlPlane) -> None:
    job = submit(plane, "", storage={"datasets": "s3://hanzo-ml/datasets/nobody/3/"})
    assert not materialize(job).success
    assert "names dataset nobody@3, which does not exist" in ended(plane, job)[0].reason


def test_rematerializing_a_completed_command_does_not_rerun_it(plane: ControlPlane) -> None:
    count = "import os\nopen(os.environ['HANZO_ML_CHECKPOINTS'] + '/starts', 'a').write('x')"
    job = submit(plane, count)
    assert materialize(job).success and materialize(job).success
    left = ended(plane, job)[0].artifact("checkpoints")
    assert plane.store.get_bytes(f"{left.uri}/starts") == b"x"
