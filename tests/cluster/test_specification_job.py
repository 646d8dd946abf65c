"""The specification's job file, 4 nodes x 8 GPUs, is created as `--dry-run` prints it.

It runs on fake nodes and on real ones.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.contracts.command_job import CommandJob
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Job
from resources.compute.base import Phase
from resources.jobs.command import plan_command, submit_command
from resources.jobs.resume import LOSS_METRIC
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.job_attempts import Claim
from resources.metadata.job_record import UNSUBMITTED
from resources.metadata.jobs import DATASET_KEY
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.metrics import Metrics
from tests.cluster.cluster import GPU, Cluster
from tests.cluster.images import JOB_IMAGE
from tests.cluster.installation import GPU_TYPE, REPOSITORY, Installation, wait_until
from tests.cluster.trainings import nodes_of, pods_of
from tests.support.api.command_job import SPECIFICATION

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

TRAIN = Path(__file__).with_name("specification_train.py")
NODES, RANKS = 4, 32
IMAGE = "docker.io/hanzoai/ml-pytorch:2.3-cuda12.4"
QUOTA = {"gpus": RANKS, "cpu": NODES * 64, "memory": "2Ti"}
"""The job's requests, unchanged."""
KINDS = {"ConfigMap": "configmap", "Secret": "secret", "JobSet": "jobset"}
ROWS = [{"input": number / 64, "answer": 3 * number / 64} for number in range(64)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create the user's folder: a job file and what it runs."""
    (tmp_path / "job.yaml").write_text(SPECIFICATION)
    (tmp_path / "train.py").write_text(TRAIN.read_text())
    return tmp_path


@pytest.mark.requirement("A6", "Z2")
def test_dry_run_prints_what_is_created_and_the_gang_runs_on_fake_nodes(
    cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    # Real GPU nodes carry this taint; those of the test cluster have too few processors for this job.
    cluster.add_fake_nodes(NODES, run_seconds=20, taint=GPU)
    try:
        scheduler = {"capacity": {GPU_TYPE: QUOTA}, "volumes": [], "user_commands": True}
        with Installation(cluster, "fake", tmp_path / "installation", scheduler=scheduler) as installation:
            create_dataset(installation)
            printed = dry_run(installation, folder)
            job = submit(installation, folder)
            installation.wait_for(job, Phase.STARTING)
            wait_until(lambda: len(running(installation, job)) == NODES, 120, lambda: installation.describe(job))
            created = [read(installation, item) for item in as_submitted(printed, job)]
            for expected, found in zip(as_submitted(printed, job), created, strict=True):
                assert_contains(found, expected, expected["kind"])
            assert nodes_of(installation, job) == [f"fake-{number}" for number in range(1, NODES + 1)]
            first = running(installation, job)[0]["metadata"]["uid"]
            installation.attempts.claim(job, Claim(1, first, node_rank=0, num_nodes=NODES, node="fake-1"))
            installation.wait_for(job, Phase.RUNNING)
            installation.wait_for(job, Phase.SUCCEEDED)
    finally:
        cluster.remove_fake_nodes()


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Start four real nodes that have the image of jobs under the specification's name."""
    cluster.require_nodes(NODES)
    for node in cluster.nodes.values():
        node.tag_image(JOB_IMAGE, IMAGE)
    with Installation(cluster, "specification", tmp_path_factory.mktemp("installation"), gpus=RANKS) as installation:
        yield installation


@pytest.mark.requirement("G2", "G7", "H2", "H8")
def test_job_runs_on_four_nodes_with_eight_ranks_each(installation: Installation, folder: Path) -> None:
    document = yaml.safe_load(SPECIFICATION)
    document["resources"] |= {"cpu": 1, "memory": "4Gi"}  # all resources of which this machine has less
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    create_dataset(installation)
    job = submit(installation, folder)
    ended = installation.wait_for(job, Phase.SUCCEEDED, within=600)
    assert (ended.attempt, ended.reason) == (1, ExitReason.COMPLETED)
    (attempt,) = installation.attempts.list(job)
    assert len(set(attempt.nodes)) == NODES
    result = installation.compute.result(job)
    assert result is not None
    checkpoint = installation.store.fetch(result.artifacts["checkpoints"], folder / "cache")
    made = json.loads((checkpoint / "result.json").read_text())
    assert (made["world"], len(made["hosts"]), made["rows"]) == (RANKS, NODES, len(ROWS))
    assert made["weight"] == pytest.approx(train_alone())
    logged = {point.key: point.step for point in Metrics(installation.database).latest(job.id)}
    assert logged[LOSS_METRIC] == 5


def create_dataset(installation: Installation) -> None:
    """Create version 7 of the dataset that the job file names."""
    records = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
    folder = installation.home / "finance-corpus-v3"
    folder.mkdir()
    (folder / "records.jsonl").write_bytes(records)
    place = "s3://hanzo-ml/datasets/finance-corpus-v3/7"
    artifact = installation.store.publish(folder, f"{place}/records", "dataset")
    version = DatasetVersion(
        id="finance-corpus-v3-7",
        name="finance-corpus-v3",
        version=7,
        organization="default",
        created_at=now_ms(),
        created_by="tester",
        storage_path=f"{place}/",
        format="jsonl",
        size_bytes=len(records),
        num_records=len(ROWS),
        schema={"input": "float", "answer": "float"},
        splits={},
        metadata={},
        tags=[],
        lineage={"parent_datasets": [], "transform": "upload"},
        content_sha256=artifact.digest,
        artifact=artifact,
    )
    with installation.database.write() as connection:
        Datasets(installation.database).add(connection, version)


def dry_run(installation: Installation, folder: Path) -> str:
    code = "from hanzo_ml.cli import main; main()"
    words = [sys.executable, "-c", code, "job", "submit", "--config", str(folder / "job.yaml"), "--dry-run"]
    done = subprocess.run(words, cwd=REPOSITORY, env=installation.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot reach" not in done.stdout
    return done.stdout


def submit(installation: Installation, folder: Path) -> Job:
    """Submit as API and sensor do."""
    document = yaml.safe_load((folder / "job.yaml").read_text())
    asked = CommandJob.model_validate({**document, "files": {"train.py": (folder / "train.py").read_text()}})
    record = submit_command(installation.database, installation.store, asked, "tester", "default")
    job = plan_command(
        record,
        Datasets(installation.database).read(record.config[DATASET_KEY], "default").artifact,
        store=installation.settings.store,
        tracking_uri=installation.settings.tracking_uri,
        cache_dir=str(installation.settings.home / "cache"),
    )
    installation.compute.submit(job)
    return job


def as_submitted(printed: str, job: Job) -> list[dict[str, Any]]:
    """Return the printed objects with what is known only at submission.

    That is the job's id, and the digest that follows from it.
    """
    digest = next(yaml.safe_load_all(printed))["metadata"]["annotations"]["ml.hanzo.ai/work-digest"]
    text = printed.replace(UNSUBMITTED, job.id).replace(digest, job.work_digest)
    items = list(yaml.safe_load_all(text))
    for item in items:
        item.pop("stringData", None)  # the token is made at the submission
        item.get("spec", {}).pop("suspend", None)  # set by Kueue from the submission on
    return items


def read(installation: Installation, item: Mapping[str, Any]) -> Any:
    return installation.cluster.get(KINDS[item["kind"]], item["metadata"]["name"], f"--namespace={installation.name}")


def running(installation: Installation, job: Job) -> list[dict[str, Any]]:
    pods = pods_of(installation, job)
    return [pod for pod in pods if pod["status"]["phase"] == "Running"]


def assert_contains(found: Any, expected: Any, place: str) -> None:
    """Assert that an object contains what was printed.

    API server and controllers only add to it.
    """
    if isinstance(expected, Mapping):
        assert expected.keys() <= found.keys(), (place, expected.keys() - found.keys())
        for key, value in expected.items():
            assert_contains(found[key], value, f"{place}.{key}")
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(found) == len(expected), (place, found)
        for index, value in enumerate(expected):
            assert_contains(found[index], value, f"{place}[{index}]")
    else:
        assert found == expected, place


def train_alone() -> float:
    """Return the weight that all ranks together compute."""
    weight = 0.0
    for _ in range(5):
        weight -= 0.1 * sum(2 * (weight * row["input"] - row["answer"]) * row["input"] for row in ROWS) / len(ROWS)
    return weight
