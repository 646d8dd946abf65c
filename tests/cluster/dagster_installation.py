"""An installation with Dagster, whose runs are pods.

Code server, daemon, web server, API and controller are processes.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import dagster as dg
import httpx
import psutil
from rich.console import Console

from recipes.contracts.command_job import CommandJob
from recipes.contracts.job import Program
from resources.installation import WORKSPACE_FILE
from resources.jobs.command import submit_command
from resources.metadata.cluster_jobs import ClusterJob
from resources.metadata.job_record import JobRecord
from resources.metadata.jobs import Jobs
from resources.metadata.outbox import Event, read_after
from resources.orchestration.instance import migrate_dagster
from resources.orchestration.kubernetes_instance import INSTALLATION_LABEL
from resources.orchestration.launcher_role import DAGSTER_ACCOUNT, launcher_objects
from tests.cluster.installation import REPOSITORY, Installation, wait_until
from tests.support.free_ports import free_port

SETTINGS_MAP, SECRET = "hanzo-ml", "hanzo-ml-secrets"
RUN_WORKERS = f"--selector={INSTALLATION_LABEL}"
ENDED = ("SUCCESS", "FAILURE", "CANCELED")
LAUNCH = """mutation($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
ADD_PARTITION = """mutation($repository: RepositorySelector!, $set: String!, $key: String!) {
    addDynamicPartition(repositorySelector: $repository, partitionsDefName: $set, partitionKey: $key) { __typename } }"""
TERMINATE = "mutation($run: String!) { terminateRun(runId: $run, terminatePolicy: SAFE_TERMINATE) { __typename } }"
STATUS = "query($run: ID!) { runOrError(runId: $run) { ... on Run { status } } }"
EVENTS = """query($run: ID!) { logsForRun(runId: $run, limit: 1000) { ... on EventConnection { events {
    __typename ... on MessageEvent { message } ... on LogsCapturedEvent { fileKey }
    ... on ExecutionStepFailureEvent { error { message } failureMetadata { metadataEntries {
        label ... on TextMetadataEntry { text } } } } } } } }"""
LOG_LINKS = "query($key: [String!]!) { capturedLogsMetadata(logKey: $key) { stdoutDownloadUrl stderrDownloadUrl } }"
REPOSITORY_NAMES = "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }"
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
        self.cluster.kubectl("label", "node", "--all", label, "--overwrite")  # of the nodes of its flavor
        self.records = Jobs(self.database)
        keys, secret = self.settings.storage.variables, {"namespace": self.name, "name": SECRET}
        self.apply_settings()
        self.cluster.apply(
            *launcher_objects(self.settings.dagster.run_pods),
            {"apiVersion": "v1", "kind": "Secret", "metadata": secret, "stringData": keys},
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
        # After a failed test its job still runs, and may need its grace period to end.
        for kinds in ("jobsets,jobs", "pods"):
            self.cluster.kubectl("delete", kinds, "--all", f"--namespace={self.name}", "--wait=false", "--now")
        super().__exit__(*problem)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {
            "DAGSTER_HOME": str(self.home / "dagster"),
            "DAGSTER_CODE_SERVER_HOST": "127.0.0.1",
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

    def graphql(self, query: str, **variables: Any) -> Any:
        """Query the web server, as the UI in a browser does."""
        body = {"query": query, "variables": variables}
        answer = httpx.post(f"{self.ui_url}/graphql", json=body, timeout=60, trust_env=False).json()
        assert "errors" not in answer, answer
        return answer["data"]

    def apply_settings(self) -> None:
        """Apply the ConfigMap that run pods read their settings from."""
        place = {"namespace": self.name, "name": SETTINGS_MAP}
        data = {"config.yaml": (self.home / "config.yaml").read_text()}
        self.cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": place, "data": data})

    def stop_queue(self, policy: str) -> None:
        """Set the queue's stop policy.

        `Hold`: no further job is admitted; `None`: they are again.
        """
        self.cluster.kubectl(
            "patch", "clusterqueue", self.name, "--type=merge", f'--patch={{"spec": {{"stopPolicy": "{policy}"}}}}'
        )

    def start_ui(self) -> None:
        if "web-server" not in self.running:
            self.start("web-server")
        wait_until(self._answers_ui, 90, lambda: self.log("web-server"))
        (found,) = self.graphql(REPOSITORY_NAMES)["repositoriesOrError"]["nodes"]
        self._repository = {"repositoryName": found["name"], "repositoryLocationName": found["location"]["name"]}

    def launch(
        self, keys: Sequence[Sequence[str]], partition: str | None = None, config: Mapping[str, Any] | None = None
    ) -> str:
        """Launch as the button *Materialize* does; return the run's id.

        `config` is that of the first asset.
        """
        tags = {"dagster/from_ui": "true"} | ({"dagster/partition": partition} if partition else {})
        assets = [{"path": list(key)} for key in keys]
        params = {
            "selector": {**self._repository, "jobName": "__ASSET_JOB", "assetSelection": assets},
            "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in tags.items()]},
            "mode": "default",
            "runConfigData": json.dumps({"ops": {"__".join(keys[0]): {"config": config}}} if config else {}),
        }
        launched = self.graphql(LAUNCH, params=params)["launchPipelineExecution"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return str(launched["run"]["runId"])

    def add_partition(self, partitions: str, key: str) -> None:
        made = self.graphql(ADD_PARTITION, repository=self._repository, set=partitions, key=key)["addDynamicPartition"]
        assert made["__typename"] == "AddDynamicPartitionSuccess", made

    def terminate(self, run_id: str) -> None:
        """Terminate a run as the button *Terminate* does."""
        assert self.graphql(TERMINATE, run=run_id)["terminateRun"]["__typename"] == "TerminateRunSuccess"

    def run_events(self, run_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.graphql(EVENTS, run=run_id)["logsForRun"]["events"]
        return found

    def messages(self, run_id: str) -> str:
        """Return the messages on the page of a run."""
        return "\n".join(str(event.get("message")) for event in self.run_events(run_id))

    def wait_for_end(self, run_id: str, status: str = "SUCCESS", within: float = 300) -> int:
        """Wait for a run's end in the UI; return its worker's peak memory (bytes)."""
        peak = 0

        def has_ended() -> bool:
            nonlocal peak
            peak = max(peak, measure_worker(run_id))
            return self.graphql(STATUS, run=run_id)["runOrError"]["status"] in ENDED

        wait_until(has_ended, within, lambda: self.messages(run_id))
        assert self.graphql(STATUS, run=run_id)["runOrError"]["status"] == status, self.messages(run_id)
        return peak

    def download_logs(self, run_id: str) -> list[str]:
        """Download stdout and stderr of a run by the links of its page.

        Returns an empty text where the page has no link.
        """
        (captured,) = (event for event in self.run_events(run_id) if event["__typename"] == "LogsCapturedEvent")
        key = [run_id, "compute_logs", captured["fileKey"]]
        links = self.graphql(LOG_LINKS, key=key)["capturedLogsMetadata"].values()
        return [httpx.get(link, trust_env=False).raise_for_status().text if link else "" for link in links]

    def submit_loop(self, name: str, seconds: int, **resources: int) -> JobRecord:
        """Submit a job that prints a line each second."""
        return self.submit_command(name, LOOP.format(seconds=seconds), **resources)

    def submit_command(self, name: str, code: str, **resources: int) -> JobRecord:
        """Submit a job that runs this Python code."""
        document = {
            "name": name,
            "command": ["python", "-c", code],
            "resources": {"cpu": 1, "memory": "256Mi", **resources},
        }
        return submit_command(self.database, self.store, CommandJob.model_validate(document), "ann", "default")

    def read(self, job: JobRecord) -> JobRecord:
        return self.records.read(job.id)

    def runs(self, job: JobRecord, *statuses: dg.DagsterRunStatus) -> list[dg.DagsterRun]:
        """Return the Dagster runs of a job, newest first."""
        filters = dg.RunsFilter(tags={"dagster/partition": job.id}, statuses=list(statuses) or None)
        return list(self.instance.get_runs(filters))

    def wait_for_run(self, job: JobRecord, *, after: dg.DagsterRun | None = None, within: float = 120) -> dg.DagsterRun:
        """Wait until a started run supervises a job, other than `after`."""

        def started() -> list[dg.DagsterRun]:
            found = self.runs(job, dg.DagsterRunStatus.STARTED)
            return [run for run in found if after is None or run.run_id != after.run_id]

        wait_until(lambda: bool(started()), within, lambda: self.describe_runs(job))
        return started()[0]

    def wait_for_status(self, job: JobRecord, status: str, within: float = 180) -> JobRecord:
        wait_until(lambda: self.read(job).status == status, within, lambda: self.describe_runs(job))
        return self.read(job)

    def run_pods(self, run: dg.DagsterRun | None = None) -> list[dict[str, Any]]:
        """Return active run pods, of one run or of all."""
        pods = self.cluster.get("pods", f"--namespace={self.name}", RUN_WORKERS)["items"]
        living = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        return [pod for pod in living if run is None or pod["metadata"]["labels"]["dagster/run-id"] == run.run_id]

    def gang_pods(self, job: JobRecord) -> list[dict[str, Any]]:
        selector = "--selector=app=hanzo-ml-job"
        pods = self.cluster.get("pods", f"--namespace={self.name}", selector)["items"]
        return [pod for pod in pods if job.id in pod["metadata"]["annotations"].values()]

    def read_events(self, kind: str) -> list[Event]:
        with self.database.read() as connection:
            return read_after(connection, 0, (kind,), 1000)

    def events(self, job: JobRecord, kind: str) -> list[Event]:
        return [event for event in self.read_events(kind) if event.key == job.id]

    def programs(self, program: Program) -> list[ClusterJob]:
        """Return the cluster's records of a program."""
        return [row for row in self.jobs.active() if row.program is program]

    def event_types(self, run: dg.DagsterRun) -> set[str]:
        entries = self.instance.all_logs(run.run_id)
        return {str(entry.dagster_event.event_type_value) for entry in entries if entry.dagster_event is not None}

    def find_evaluation(self, partition: str) -> str | None:
        """Return the run that a sensor launched to evaluate a training."""
        runs = self.instance.get_runs(dg.RunsFilter(tags={"dagster/partition": partition}))
        found = (run.run_id for run in runs if {key.path[-1] for key in run.asset_selection or ()} >= {"evaluation"})
        return next(found, None)

    def describe_runs(self, job: JobRecord) -> str:
        runs = "\n".join(f"{run.run_id} {run.status} {run.tags}" for run in self.runs(job))
        pods = self.cluster.kubectl("get", "pods", f"--namespace={self.name}", "--output=wide")
        logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in ("code-server", "daemon", "controller"))
        return f"{self.read(job)}\n--- runs\n{runs}\n--- pods\n{pods}\n{logs}"

    def _config(self) -> dict[str, Any]:
        run_pods = {"namespace": self.name, "config_map": SETTINGS_MAP, "secrets": [SECRET]}
        return super()._config() | {"dagster": {"run_pods": run_pods}}

    def _answers_ui(self) -> bool:
        with suppress(httpx.TransportError):
            return bool(self.graphql(REPOSITORY_NAMES)["repositoriesOrError"]["nodes"])
        return False

    def _write_launcher_kubeconfig(self) -> Path:
        token = self.cluster.kubectl("create", "token", DAGSTER_ACCOUNT, f"--namespace={self.name}", "--duration=4h").strip()
        path = self.home / "launcher.kubeconfig"
        path.write_text(self.cluster.kubeconfig.read_text())
        path.chmod(0o600)
        user = ("config", f"--kubeconfig={path}")
        self.cluster.kubectl(*user, "set-credentials", "launcher", f"--token={token}")
        self.cluster.kubectl(*user, "set-context", "--current", "--user=launcher")
        return path


def measure_worker(run_id: str) -> int:
    """Return the peak memory of a run's worker in bytes; 0 where none runs.

    Includes all its processes. They load no PyTorch.
    """
    peak = 0
    for pid in find_worker(run_id):
        with suppress(FileNotFoundError, ProcessLookupError):
            folder = Path(f"/proc/{pid}")
            lines = (folder / "status").read_text().splitlines()
            peak += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))  # a zombie has none
            assert "libtorch" not in (folder / "maps").read_text()
    return peak


def kill_worker(run_id: str) -> None:
    """SIGKILL all processes of a run's worker, whose pod notices later."""
    for pid in find_worker(run_id):
        os.kill(pid, signal.SIGKILL)


def find_worker(run_id: str) -> list[int]:
    """Find the processes of a run's worker, as this machine sees them."""
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if run_id in " ".join(process.info["cmdline"] or ())]
