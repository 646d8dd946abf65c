"""An installation with Dagster: code server and daemon as processes beside API and controller, runs as pods."""

import sys
from pathlib import Path
from typing import Any, Self

import dagster as dg
from rich.console import Console

from recipes.contracts.command_job import CommandJob
from resources.installation import WORKSPACE_FILE
from resources.jobs.command import submit_command
from resources.metadata.job_record import JobRecord
from resources.metadata.jobs import Jobs
from resources.metadata.outbox import Event, read_after
from resources.orchestration.instance import migrate_dagster
from resources.orchestration.launcher_role import DAGSTER_ACCOUNT, launcher_objects
from tests.cluster.installation import REPOSITORY, Installation, wait_until
from tests.free_ports import free_port

SETTINGS_MAP, SECRET = "hanzo-ml", "hanzo-ml-secrets"
RUN_WORKERS = "--selector=app.kubernetes.io/component=run_worker"
LOOP = """
import time
for second in range({seconds}):
    print("second", second, flush=True)
    time.sleep(1)
"""


class DagsterInstallation(Installation):
    """Its launcher has the permissions of its Role, not those of an administrator.

    Dagster's instance is opened in the test's process too, whose environment must be `environment`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._code_server_port = free_port()
        self._web_server_port = free_port()

    def __enter__(self) -> Self:
        super().__enter__()
        label = f"{self.settings.scheduler.gpu_type_label}={self.settings.scheduler.gpu_types[0]}"
        self.cluster.kubectl("label", "node", "--all", label, "--overwrite")  # of its flavor's nodes
        self.records = Jobs(self.database)
        keys = self.settings.storage.variables
        metadata = {"namespace": self.name}
        config = (self.home / "config.yaml").read_text()
        self.cluster.apply(
            *launcher_objects(self.settings.dagster.run_pods),
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": metadata | {"name": SETTINGS_MAP},
                "data": {"config.yaml": config},
            },
            {"apiVersion": "v1", "kind": "Secret", "metadata": metadata | {"name": SECRET}, "stringData": keys},
        )
        launcher = self.settings.scheduler.model_copy(update={"kubeconfig": str(self._write_launcher_kubeconfig())})
        migrate_dagster(self.settings.model_copy(update={"scheduler": launcher}), Console())
        self.instance = dg.DagsterInstance.from_config(str(self.settings.dagster_home))
        self.start("code-server")
        wait_until(lambda: "Started Dagster code server" in self.log("code-server"), 60, lambda: self.log("code-server"))
        self.start("daemon")
        return self

    def __exit__(self, *problem: object) -> None:
        self.instance.dispose()
        # Where a test failed its job still runs, and may take its grace period to end.
        for kinds in ("jobsets,jobs", "pods"):
            self.cluster.kubectl("delete", kinds, "--all", f"--namespace={self.name}", "--wait=false", "--now")
        super().__exit__(*problem)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {
            "DAGSTER_HOME": str(self.home / "dagster"),
            "DAGSTER_CODE_SERVER_PORT": str(self._code_server_port),
            "AWS_ACCESS_KEY_ID": self.cluster.s3.access_key,
            "AWS_SECRET_ACCESS_KEY": self.cluster.s3.secret_key,
        }

    def command(self, program: str) -> list[str]:
        port, workspace = str(self._code_server_port), str(REPOSITORY / WORKSPACE_FILE)
        known = {
            "code-server": ["dagster", "api", "grpc", "-m", "hanzo_ml_assets.definitions", "-h", "127.0.0.1", "-p", port],
            "daemon": ["resources.orchestration.daemon", "run", "-w", workspace],
            "web-server": ["dagster_webserver", "-w", workspace, "-h", "127.0.0.1", "-p", str(self._web_server_port)],
        }
        return [sys.executable, "-m", *known[program]] if program in known else super().command(program)

    @property
    def ui_url(self) -> str:
        return f"http://127.0.0.1:{self._web_server_port}"

    def submit_loop(self, name: str, seconds: int, gpus: int = 0) -> JobRecord:
        """Submit a job that prints a line each second."""
        document = {
            "name": name,
            "command": ["python", "-c", LOOP.format(seconds=seconds)],
            "resources": {"cpu": 1, "memory": "256Mi", "gpus": gpus},
        }
        return submit_command(self.database, self.store, CommandJob.model_validate(document), "ann", "default")

    def read(self, job: JobRecord) -> JobRecord:
        return self.records.read(job.id)

    def runs(self, job: JobRecord, *statuses: dg.DagsterRunStatus) -> list[dg.DagsterRun]:
        """Dagster runs of a job, newest first."""
        filters = dg.RunsFilter(tags={"dagster/partition": job.id}, statuses=list(statuses) or None)
        return list(self.instance.get_runs(filters))

    def wait_for_run(self, job: JobRecord, *, after: dg.DagsterRun | None = None, within: float = 120) -> dg.DagsterRun:
        """Wait until a started run supervises a job, one that is not `after`."""

        def started() -> list[dg.DagsterRun]:
            found = self.runs(job, dg.DagsterRunStatus.STARTED)
            return [run for run in found if after is None or run.run_id != after.run_id]

        wait_until(lambda: bool(started()), within, lambda: self.describe_runs(job))
        return started()[0]

    def wait_for_status(self, job: JobRecord, status: str, within: float = 180) -> JobRecord:
        wait_until(lambda: self.read(job).status == status, within, lambda: self.describe_runs(job))
        return self.read(job)

    def run_pods(self, run: dg.DagsterRun | None = None) -> list[dict[str, Any]]:
        """Run pods that have not ended, of one run or of all."""
        pods = self.cluster.get("pods", f"--namespace={self.name}", RUN_WORKERS)["items"]
        living = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        return [pod for pod in living if run is None or pod["metadata"]["labels"]["dagster/run-id"] == run.run_id]

    def gang_pods(self, job: JobRecord) -> list[dict[str, Any]]:
        selector = "--selector=app=hanzo-ml-job"
        pods = self.cluster.get("pods", f"--namespace={self.name}", selector)["items"]
        return [pod for pod in pods if job.id in pod["metadata"]["annotations"].values()]

    def events(self, job: JobRecord, kind: str) -> list[Event]:
        with self.database.read() as connection:
            return [event for event in read_after(connection, 0, (kind,), 1000) if event.key == job.id]

    def describe_runs(self, job: JobRecord) -> str:
        runs = "\n".join(f"{run.run_id} {run.status} {run.tags}" for run in self.runs(job))
        pods = self.cluster.kubectl("get", "pods", f"--namespace={self.name}", "--output=wide")
        logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in ("code-server", "daemon", "controller"))
        return f"{self.read(job)}\n--- runs\n{runs}\n--- pods\n{pods}\n{logs}"

    def _config(self) -> dict[str, Any]:
        run_pods = {"namespace": self.name, "config_map": SETTINGS_MAP, "secrets": [SECRET]}
        return super()._config() | {"dagster": {"run_pods": run_pods}}

    def _write_launcher_kubeconfig(self) -> Path:
        token = self.cluster.kubectl("create", "token", DAGSTER_ACCOUNT, f"--namespace={self.name}", "--duration=4h").strip()
        path = self.home / "launcher.kubeconfig"
        path.write_text(self.cluster.kubeconfig.read_text())
        path.chmod(0o600)
        user = ("config", f"--kubeconfig={path}")
        self.cluster.kubectl(*user, "set-credentials", "launcher", f"--token={token}")
        self.cluster.kubectl(*user, "set-context", "--current", "--user=launcher")
        return path
