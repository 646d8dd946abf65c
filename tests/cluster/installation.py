"""The control plane on the test cluster: API and controller as processes in its network.

They have their own database.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import httpx
import yaml

from recipes.contracts.job import Job
from recipes.storage.artifact_store import Store
from resources.compute.base import JobKey, Observation, Phase
from resources.compute.kubernetes.backend import KubernetesCompute
from resources.jobs.resume import LOSS_METRIC
from resources.metadata.cluster_jobs import ClusterJobs
from resources.metadata.database import Database
from resources.metadata.job_attempts import JobAttempts
from resources.metadata.tracking.metrics import Metrics
from resources.settings.settings import Settings
from tests.cluster.cluster import Cluster
from tests.cluster.dependencies import CLAIM
from tests.cluster.images import DEPENDENCIES, JOB_IMAGE
from tests.support.free_ports import free_port
from tests.support.migrated_database import migrate

REPOSITORY = Path(__file__).parents[2]
GPU_TYPE = "nvidia-a100-80gb"
"""Of all nodes of the test cluster."""
ENDS_WITHIN = 300.0


class Installation:
    """One installation in a Kubernetes namespace of its own.

    Args:
        name: the beginning of its namespace, database and queue.
        gpus: the quota of its queue, in addition to 64 cores and 64 GiB of memory.
        scheduler: more settings of the section `scheduler`.
    """

    def __init__(self, cluster: Cluster, name: str, home: Path, gpus: int = 24, scheduler: Mapping[str, Any] | None = None):
        self.cluster = cluster
        self.name = f"{name}-{uuid4().hex[:6]}"  # does not collide with what a killed test run left
        self.home = home
        self.port = free_port()
        self._gpus = gpus
        self._scheduler = dict(scheduler or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.yaml").write_text(yaml.safe_dump(self._config()))
        self.settings = Settings.load(self.environment)
        self.database = Database(self.settings.database_url)
        migrate(self.database)
        self.store = Store(self.settings.store, self.settings.storage.variables)
        self.compute = KubernetesCompute(self.database, self.store, self.settings.scheduler, poll_seconds=0.5)
        self.jobs = ClusterJobs(self.database)
        self.attempts = JobAttempts(self.database)
        self.cluster.create_namespace(self.name)
        self.cluster.kubectl(
            "label", "nodes", "--all", f"{self.settings.scheduler.gpu_type_label}={GPU_TYPE}", "--overwrite"
        )
        rendered = self._run("hanzo_ml", "cluster", "render")
        self.cluster.kubectl("apply", "--server-side", "--filename=-", document=rendered)
        for program in ("api", "controller"):
            self.start(program)
        wait_until(self.is_ready, ENDS_WITHIN, lambda: f"the API is not ready:\n{self.log('api')}")
        return self

    def __exit__(self, *_: object) -> None:
        for program in list(self._processes):
            self.kill(program)
        self.cluster.delete_namespace(self.name)
        self.cluster.kubectl("delete", "clusterqueue", self.name)
        self.database.close()

    @property
    def url(self) -> str:
        return f"http://{self.cluster.address}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HANZO_ML_", "MLFLOW_", "AWS_"))}
        return kept | {"HANZO_ML_HOME": str(self.home), "HANZO_ML_CONFIG": str(self.home / "config.yaml")}

    def command(self, program: str) -> list[str]:
        module = {"api": "api.server", "controller": "resources.compute.kubernetes.controller"}[program]
        return [sys.executable, "-m", module]

    def start(self, program: str) -> None:
        with (self.home / f"{program}.log").open("ab") as log:
            self._processes[program] = subprocess.Popen(
                # They end together with a killed test run.
                ["setpriv", "--pdeathsig=KILL", *self.command(program)],
                cwd=REPOSITORY,
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    @property
    def running(self) -> set[str]:
        return set(self._processes)

    def kill(self, program: str) -> None:
        process = self._processes.pop(program)
        process.kill()
        process.wait()

    def pid(self, program: str) -> int:
        return self._processes[program].pid

    def log(self, program: str) -> str:
        return (self.home / f"{program}.log").read_text()[-3000:]

    def observe(self, job: JobKey) -> Observation:
        return self.compute.observe(job)

    def wait_for(self, job: JobKey, *phases: Phase, within: float = ENDS_WITHIN) -> Observation:
        """Wait until a submitted job is in one of these phases.

        Raises AssertionError where it ends otherwise.
        """
        awaited = {*phases, Phase.SUCCEEDED, Phase.FAILED}
        deadline = time.monotonic() + within
        while (seen := self.observe(job)).phase not in awaited:
            assert time.monotonic() < deadline, self.describe(job)
            time.sleep(0.3)
        assert seen.phase in phases, self.describe(job)
        return seen

    def wait_for_step(self, job: Job, step: int, within: float = ENDS_WITHIN) -> None:
        """Wait until a training has logged the loss of a step."""
        wait_until(lambda: self.last_step(job) >= step, within, lambda: self.describe(job))

    def last_step(self, job: Job) -> int:
        assert job.tracking is not None
        known = {point.key: point.step for point in Metrics(self.database).latest(job.tracking.run_id)}
        return known.get(LOSS_METRIC, 0)

    def describe(self, job: JobKey) -> str:
        """Describe a job for a failed test.

        Includes its row, its log, its pods and the controller's log.
        """
        log = self.compute.read_log(job, max(0, self.compute.log_size(job) - 4000)).decode(errors="replace")
        pods = self.cluster.kubectl("get", "pods", f"--namespace={self.name}", "--output=wide")
        return f"{self.observe(job)}\n--- log\n{log}\n--- pods\n{pods}\n--- controller\n{self.log('controller')}"

    def _config(self) -> dict[str, Any]:
        s3 = self.cluster.s3
        cpu = {"cpu": 64, "memory": "64Gi"}
        return {
            "server": {"host": self.cluster.address, "port": self.port},
            "auth": {"verify_tokens": True},
            "metrics": {"enabled": False},
            "database": {"url": self.cluster.postgres.create_database(self.name.replace("-", "_"))},
            "storage": {
                "endpoint": s3.url,
                "access_key": s3.access_key,
                "secret_key": s3.secret_key,
                "encryption": "none",
            },
            "scheduler": {
                "backend": "kubernetes",
                "kubeconfig": str(self.cluster.kubeconfig),
                "namespace": self.name,
                "queue": self.name,
                "cluster_queue": self.name,
                "default_image": JOB_IMAGE,
                "volumes": [{"claim": CLAIM, "path": DEPENDENCIES, "read_only": True}],
                "tracking_uri": self.url,
                "egress": [{"cidr": f"{self.cluster.address}/32", "ports": [53]}],  # DNS is no pod here
                "capacity": {"cpu": cpu, GPU_TYPE: {"gpus": self._gpus, **cpu}},
                **self._scheduler,
            },
        }

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").is_success
        except httpx.TransportError:
            return False

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=REPOSITORY, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def wait_until(holds: Callable[[], bool], seconds: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.3)
