"""An installation with sign-in, for the ends of jobs in API, command line and Dagster."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import dagster as dg
import httpx
import pytest

from hanzo_ml_assets.command import COMMAND_KEY, COMMAND_PARTITIONS
from hanzo_ml_assets.definitions import definitions
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Program
from resources.compute.base import JobRef
from sensors.decisions.retry_policy import RunFailure, read_failure
from tests.api.auth.iam import Iam
from tests.cluster.installation import ENDS_WITHIN, REPOSITORY, Installation, wait_until

MEMORY = "400Mi"


@dataclass(frozen=True)
class Supervised:
    """A submitted job, and its Dagster run in a thread of the test.

    It ends with the failure of its step.
    """

    ref: JobRef
    run: "Future[RunFailure | None]"

    @property
    def id(self) -> str:
        return self.ref.id


class SignedInInstallation(Installation):
    """Its supervisors run in the test's process, whose environment must be `environment`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.iam = Iam()
        self._supervisors = ThreadPoolExecutor(8)

    def __enter__(self) -> Self:
        self.iam.__enter__()
        return super().__enter__()

    def __exit__(self, *problem: object) -> None:
        for job in self.jobs.active():
            self.jobs.want_cancel(job)
        wait_until(lambda: not self.jobs.active(), ENDS_WITHIN, lambda: self.log("controller"))
        self._supervisors.shutdown()
        super().__exit__(*problem)
        self.iam.go_away()

    @cached_property
    def token(self) -> str:
        return self.iam.token("ann", "default", "ml-admin", exp=2_000_000_000)

    @cached_property
    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def submit_command(self, code: str, **keys: Any) -> Supervised:
        """Submit a command that runs this Python code, over HTTP."""
        resources = {"memory": MEMORY, **keys.pop("resources", {})}
        document = {"name": "ends", "command": ["python", "-c", code], "resources": resources, **keys}
        answer = self.http.post("/v1/jobs", json=document)
        assert answer.status_code == 201, answer.text
        return self.supervise(answer.json()["id"])

    def supervise(self, job_id: str) -> Supervised:
        """Start the Dagster run of a command, as the sensor does after its admission."""
        return Supervised(JobRef(job_id, Program.COMMAND), self._supervisors.submit(self._materialize, job_id))

    def cli(self, *words: str) -> str:
        done = self.run_cli(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run_cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        variables = {"HANZO_ML_TRACKING_URI": self.url, "MLFLOW_TRACKING_TOKEN": self.token}
        command = [sys.executable, "-m", "hanzo_ml", *words]
        environment = self.environment | variables
        return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)

    def read(self, job_id: str) -> dict[str, Any]:
        """Return the job as the API shows it."""
        answer = self.http.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def state(self, job_id: str) -> dict[str, Any]:
        """Return the state of its program on the cluster, as the API shows it."""
        found = self.read(job_id).get("cluster") or [{"phase": "", "detail": "", "reason": None}]
        return dict(found[0])

    def wait_until_running(self, job: Supervised) -> None:
        wait_until(lambda: self.state(job.id)["phase"] == "running", ENDS_WITHIN, lambda: str(self.read(job.id)))

    def wait_for_words(self, job: Supervised, *words: str) -> dict[str, Any]:
        """Wait until the API shows why a job waits.

        The command line and the job's own record show the same.
        """
        wait_until(
            lambda: contains(self.state(job.id)["detail"], words) and contains(self.read(job.id)["reason"], words),
            ENDS_WITHIN,
            lambda: f"{self.read(job.id)}\n{self.describe(job.ref)}",
        )
        shown = json.loads(self.cli("job", "get", job.id))
        assert contains(shown["cluster"][0]["detail"], words), shown
        return self.state(job.id)

    def assert_failed(self, job: Supervised, reason: ExitReason, *words: str) -> str:
        """Wait for the failure of a job with this reason and message.

        API, command line and Dagster show both.
        """
        failure = job.run.result(ENDS_WITHIN)
        assert failure is not None, self.describe(job.ref)
        assert failure.reasons == {reason} and contains(failure.cause, words), f"{failure}\n{self.describe(job.ref)}"
        for shown in (self.read(job.id), json.loads(self.cli("job", "get", job.id))):
            [state] = shown["cluster"]
            assert shown["status"] == state["phase"] == "failed", shown
            assert state["reason"] == reason and contains(state["detail"], words), shown
            assert contains(shown["reason"], words), shown
        return str(self.state(job.id)["detail"])

    def assert_completed(self, job: Supervised) -> dict[str, Any]:
        failure = job.run.result(ENDS_WITHIN)
        assert failure is None, f"{failure}\n{self.describe(job.ref)}"
        found = self.read(job.id)
        assert found["status"] == "completed"
        return found

    def log_of(self, job_id: str) -> str:
        return self.cli("job", "logs", job_id)

    def _materialize(self, job_id: str) -> RunFailure | None:
        with dg.DagsterInstance.ephemeral() as instance:
            instance.add_dynamic_partitions(COMMAND_PARTITIONS, [job_id])
            done = self._graph.execute_in_process(
                instance=instance, asset_selection=[dg.AssetKey(COMMAND_KEY)], partition_key=job_id, raise_on_error=False
            )
            return None if done.success else read_failure(instance, done.dagster_run)

    @cached_property
    def _graph(self) -> Any:
        return definitions().resolve_implicit_global_asset_job_def()

    def _config(self) -> dict[str, Any]:
        return super()._config() | {"auth": {"verify_tokens": True, "iam_url": self.iam.url}}


def contains(text: str, words: tuple[str, ...]) -> bool:
    return all(each in text for each in words)


@contextmanager
def environment_of(installation: Installation) -> Iterator[None]:
    """Give the test's process the settings of an installation, as its supervisors have."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("HANZO_ML_")]:
            patch.delenv(name)
        for name, value in installation.environment.items():
            patch.setenv(name, value)
        yield
