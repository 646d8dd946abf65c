"""Training with the API as its store: same weights as directly, also on another machine."""

from pathlib import Path

import pytest

from recipes.contracts.job import Job
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreRefuses
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from tests.recipes.tiny_training import LORA, QUESTIONS, TinyTraining
from tests.resources.cluster_rows import claim_attempt
from tests.support.server_process import ServerProcess
from tests.support.signed_store import store_in_pod, submit

pytestmark = pytest.mark.slow


def submitted(server: ServerProcess, job: Job) -> str:
    """Submit a training job to the database and return its token."""
    database = Database(server.settings.database_url)
    Jobs(database).submit(name=job.id, config={}, user="ann", organization="default", id=job.id)
    database.close()
    return submit(server, job)


def begin_attempt(server: ServerProcess, job: Job, token: str, attempt: int) -> Store:
    database = Database(server.settings.database_url)
    claim_attempt(database, job, attempt)
    database.close()
    return store_in_pod(server, job, token, attempt)


def train(tiny: TinyTraining, name: str) -> dict[str, str]:
    """Return the SHA-256 of each output file of a training."""
    artifact = tiny.train(name, **LORA).artifacts["adapter"]
    return {file.path: file.sha256 for file in tiny.store.manifest(artifact).files}


def test_training_in_pods_leaves_the_same_files_and_resumes_on_another_machine(
    server_of_pods: ServerProcess, tmp_path: Path
) -> None:
    tiny = TinyTraining(tmp_path)
    expected = train(tiny, "direct")
    tiny.store = direct = Store(server_of_pods.settings.store, server_of_pods.settings.storage.variables)
    tiny.run, tiny.splits = tiny.publish("run", [{"run": 1}]), tiny.split("records", QUESTIONS)
    job = tiny.training_job("pod", tiny.recipe(**LORA))
    token = submitted(server_of_pods, job)
    tiny.store = first = begin_attempt(server_of_pods, job, token, 1)
    assert train(tiny, "pod") == expected
    tiny.store = direct
    tiny.lose_checkpoints("pod", after=2)
    tiny.store = begin_attempt(server_of_pods, job, token, 2)
    assert train(tiny, "pod") == expected
    with pytest.raises(StoreRefuses, match="attempt 1 of train is over"):
        first.put_bytes(job.result_uri, b"{}")
