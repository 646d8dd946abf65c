"""State in external PostgreSQL and S3 survives reinstallation and an upgrade.

The state is made by the first commit that could be installed, and used by this one.
"""

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from deploy.demo_cluster import NAMESPACE, environment
from hanzo_ml.cli.connection import Refused
from hanzo_ml.demo import Chain, ask_model, run_chain
from resources.installation import COMMIT_FILE
from tests.cluster.cluster import ROOT, Cluster
from tests.cluster.demo_questions import QUESTION
from tests.cluster.external_installation import ExternalInstallation
from tests.cluster.installation import wait_until
from tests.cluster.trainings import GANG_RECIPE
from tests.support import postgres_server

pytestmark = [pytest.mark.cluster, pytest.mark.install_slow]

FIRST_INSTALLABLE = "044ffdc1663cac473a6de5d3a2305236be906d75"
MODEL = "first-model"
ENDS_WITHIN = 400.0
JOBS = ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Used:
    """An installation with a served model, its API's responses, and the model's training request."""

    installation: ExternalInstallation
    facts: dict[str, Any]
    request: dict[str, Any]


@pytest.fixture(scope="module")
def used(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Used]:
    home = tmp_path_factory.mktemp("external")
    with ExternalInstallation(cluster, home) as installation:
        installation.apply(check_out(FIRST_INSTALLABLE, home / "first"), tag="first")
        base_model = installation.store_base_model(home)
        request = {"name": MODEL, "dataset": "ellarin", "parameters": GANG_RECIPE | {"base_model": base_model}}
        services = (("hanzo-ml", 8057), ("engine", 8043))
        with installation.demo.connected(*services) as [api, engine], environment(installation.demo.client_environment(api)):
            run_chain(Console(), Chain(engine, request, MODEL, (QUESTION,)))
        with installation.connected() as http:
            yield Used(installation, read_facts(http), request)


def check_out(commit: str, folder: Path) -> Path:
    """Check out the files of a commit, which identify it."""
    done = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True, check=False)
    assert done.returncode == 0, f"no history here, such as in a shallow clone: {done.stderr.decode()}"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        tar.extractall(folder, filter="data")
    (folder / COMMIT_FILE).write_text(f"{commit}\n")
    return folder


def read_facts(http: httpx.Client) -> dict[str, Any]:
    """Read what must not change: jobs, datasets, versions, and contents of runs.

    The latter are metrics, parameters and objects.
    """

    def get(path: str) -> Any:
        return http.get(path).raise_for_status().json()

    jobs = get("/v1/jobs")["jobs"]
    runs = {job["id"]: get(f"/v1/runs/{job['id']}") for job in jobs}
    version = get(f"/v1/models/{MODEL}/versions/1")
    return {
        "jobs": {job["id"]: (job["name"], job["status"]) for job in jobs},
        "datasets": get("/v1/datasets")["datasets"],
        "version": {key: version[key] for key in ("version", "stage", "run_id")},
        "runs": {run: (found["params"], found["artifacts"]) for run, found in runs.items()},
    }


def check_use(used: Used, http: httpx.Client) -> None:
    """Assert that nothing is lost, the model is proved again, and the engine responds.

    The proof reads the model's files, and the engine needs no command.
    """
    facts = read_facts(http)
    assert facts["jobs"].items() >= used.facts["jobs"].items() and facts["runs"].items() >= used.facts["runs"].items()
    assert {key: facts[key] for key in ("datasets", "version")} == {key: used.facts[key] for key in ("datasets", "version")}
    proof = http.get(f"/v1/models/{MODEL}/versions/1/proof").raise_for_status().json()
    assert proof["ok"], proof

    def answers() -> bool:
        with used.installation.demo.connected(("engine", 8043)) as [engine]:
            try:
                return bool(ask_model(engine, MODEL, QUESTION))
            except (httpx.HTTPError, Refused):
                return False

    wait_until(answers, ENDS_WITHIN, used.installation.demo.describe)


def test_upgrade_uses_the_state_of_the_first_installable_commit(used: Used) -> None:
    used.installation.apply()
    with used.installation.connected() as http:
        check_use(used, http)
        job = http.post("/v1/jobs", json=used.request | {"name": "after the upgrade"}).raise_for_status().json()["id"]

        def read_job() -> dict[str, Any]:
            return dict(http.get(f"/v1/jobs/{job}").raise_for_status().json())

        wait_until(lambda: read_job()["status"] in JOBS, ENDS_WITHIN, lambda: json.dumps(read_job(), indent=1))
        assert read_job()["status"] == "completed", read_job()


def test_lost_database_is_restored_from_a_backup(used: Used, tmp_path: Path) -> None:
    """The commands of docs/operations.md. The object store is kept, as a versioned bucket is."""
    installation, dump = used.installation, tmp_path / "hanzo-ml.dump"
    run_postgres_program("pg_dump", "--format=custom", f"--file={dump}", installation.database)
    installation.cluster.kubectl("scale", "deployment", "--all", "--replicas=0", f"--namespace={NAMESPACE}")
    wait_until(lambda: not installation.running_pods(), ENDS_WITHIN, installation.demo.describe)
    installation.lose_database()
    run_postgres_program("pg_restore", "--clean", "--if-exists", f"--dbname={installation.database}", str(dump))
    installation.apply()
    with installation.connected() as http:
        check_use(used, http)


def run_postgres_program(name: str, *arguments: str) -> None:
    done = subprocess.run([postgres_server.binaries() / name, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.requirement("A4")
def test_state_survives_delete_and_apply(used: Used) -> None:
    used.installation.delete()
    used.installation.apply()
    with used.installation.connected() as http:
        check_use(used, http)
