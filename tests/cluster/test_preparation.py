"""A dataset prepared by several pods has the same bytes as one prepared locally.

They share nothing but the object store.
"""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Hardware, Job, Result
from recipes.prepare import prepare
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, canonical_json
from resources.compute.base import Phase
from resources.datasets.prepared_versions import output_uris
from tests.cluster.cluster import Cluster
from tests.cluster.installation import Installation, wait_until
from tests.cluster.trainings import pods_of
from tests.recipes.preparation.preparation_workspace import Place
from tests.support.recipes.mixed_records import mixed

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

WORKERS = 3
SHARDS = 9
"""Files of the dataset: each is a separate unit of work, however small."""
PARAMETERS = {"filter": {"language": "en", "near_dedup": {"threshold": 0.9}}, "augment": {"oversample_minority": True}}
"""Without a tokenizer, which pods could not load from here."""


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(cluster, "prepare", tmp_path_factory.mktemp("installation")) as installation:
        yield installation


@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "one pod killed"])
def test_shared_preparation_equals_that_of_one_process(installation: Installation, tmp_path: Path, killed: bool) -> None:
    alone = Place(tmp_path / "alone", ())
    expected = make_job(alone, alone.store, "alone")
    made = prepare(expected, alone.store, tmp_path / "work")
    assert made is not None

    job = make_job(alone, installation.store, f"shared-{uuid4().hex[:6]}").model_copy(
        update={"pods": WORKERS, "hardware": Hardware(cpu=1, memory="2Gi")}
    )
    exchange = f"{job.result_uri.rpartition('/')[0]}/_pods"
    installation.compute.submit(job)
    if killed:
        wait_until(lambda: bool(installation.store.list(exchange)), 300, lambda: installation.describe(job))
        kill_pod(installation, job, rank=1)
    assert installation.wait_for(job, Phase.SUCCEEDED, within=600).reason is ExitReason.COMPLETED

    result = installation.compute.result(job)
    assert result is not None
    assert read_files(result, installation.store) == read_files(made, alone.store)
    assert (result.facts, result.metrics) == (made.facts, made.metrics)
    assert installation.store.list(exchange) == []
    if not killed:
        (attempt,) = installation.attempts.list(job)
        assert attempt.is_registered and len(attempt.nodes) == WORKERS


def make_job(place: Place, store: Store, name: str) -> Job:
    job = place.job(PARAMETERS)
    folder = f"s3://hanzo-ml/datasets/{name}"
    return job.model_copy(
        update={
            "id": uuid4().hex,
            "inputs": {"dataset": publish_shards(place.folder / name, store, f"{folder}/1/records")},
            "outputs": output_uris(f"{folder}/prepared", with_features=False),
            "result_uri": f"{folder}/prepared/result.json",
            "store": store.address,
        }
    )


def publish_shards(folder: Path, store: Store, uri: str) -> Artifact:
    folder.mkdir()
    rows = mixed(600)
    for number in range(SHARDS):
        lines = (row if isinstance(row, bytes) else canonical_json(row) for row in rows[number::SHARDS])
        (folder / f"shard-{number}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return store.publish(folder, uri, "dataset")


def kill_pod(installation: Installation, job: Job, rank: int) -> None:
    """Delete a pod without a grace period: it is not asked to stop."""
    name = pods_of(installation, job)[rank]["metadata"]["name"]
    assert f"-{rank}-" in name
    installation.cluster.kubectl(
        "delete", "pod", name, f"--namespace={installation.name}", "--grace-period=0", "--force", "--wait=false"
    )


def read_files(result: Result, store: Store) -> dict[str, str]:
    """Return the SHA-256 of every output file, by role and path."""
    return {
        f"{role}/{file.path}": file.sha256
        for role, artifact in result.artifacts.items()
        for file in store.manifest(artifact).files
    }
