"""Pods of a gang on this machine: real launchers and a real API server."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import insert, update

from recipes.contracts.exit_reason import ExitDocument
from recipes.contracts.job import EXIT_FILE, Job
from recipes.storage import uris
from recipes.storage.artifact_store import Store
from resources.jobs.program_tokens import issue_token
from resources.metadata.database import Database
from resources.metadata.job_attempts import Attempt, JobAttempts
from resources.metadata.jobs import COMMAND, TRAINING, Jobs
from resources.metadata.tables import cluster_jobs
from tests.recipes.training.simulated_pods import session
from tests.support.free_ports import free_port
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[3]
LONG = 180.0


@contextmanager
def connected(server: ServerProcess) -> Iterator[Database]:
    database = Database(server.settings.database_url)
    try:
        yield database
    finally:
        database.close()


class ClusterJob:
    """A job as in a cluster: its row, token and results of attempts."""

    def __init__(self, job: Job, server: ServerProcess) -> None:
        self.job, self.server = job, server
        self.store = Store(job.store)
        row: dict[str, Any] = {
            "job_id": job.id,
            "program": job.program.value,
            "namespace": "hanzo-ml",
            "name": f"{job.program}-{job.id}",
            "generation": 1,
            "document": job.model_dump(mode="json"),
            "wanted": "run",
            "phase": "pending",
            "detail": "",
            "attempt": 0,
            "created_at": 1,
            "updated_at": 1,
        }
        with connected(server) as database:
            kind = COMMAND if job.program == "command" else TRAINING
            Jobs(database).submit(name="n", config={}, user="ann", organization="default", id=job.id, type=kind)
            with database.write() as connection:
                connection.execute(insert(cluster_jobs).values(**row))
                self.token = issue_token(connection, job)

    def set_row(self, **values: Any) -> None:
        with connected(self.server) as database, database.write() as connection:
            connection.execute(update(cluster_jobs).where(cluster_jobs.c.job_id == self.job.id).values(**values))

    def attempts(self) -> Sequence[Attempt]:
        with connected(self.server) as database:
            return JobAttempts(database).list(self.job)

    def log(self, attempt: int, node: int = 0) -> str:
        """Return all log segments of a node, joined."""
        folder = f"{uris.attempt_folder(self.job.id, self.job.program, attempt)}/logs/node-{node}"
        return b"".join(self.store.get_bytes(uri) for uri in sorted(self.store.list(folder))).decode()

    def exit_document(self, attempt: int) -> ExitDocument:
        folder = uris.attempt_folder(self.job.id, self.job.program, attempt)
        return ExitDocument.model_validate_json(self.store.get_bytes(f"{folder}/{EXIT_FILE}"))


class LaunchedGang:
    """The launchers of one attempt.

    Args:
        processes: torchrun processes per pod, 0 without torchrun.
        prefix: command that starts each launcher, such as entering a cgroup.
    """

    def __init__(
        self,
        cluster_job: ClusterJob,
        folder: Path,
        *,
        nodes: int = 2,
        processes: int = 0,
        variables: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.cluster_job, self.folder = cluster_job, folder
        self._nodes, self._processes, self._prefix = nodes, processes, prefix
        self._variables = variables or {}
        self.heartbeat_port, self.rendezvous_port = free_port(), free_port()
        self.pods = {rank: self.start(rank) for rank in (range(nodes) if ranks is None else ranks)}

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        folder = self.folder / str(rank)
        work = folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        job = self.cluster_job.job.model_copy(update={"work_dir": str(work), "cache_dir": str(folder / "cache")})
        (folder / "job.json").write_text(job.model_dump_json())
        with self.log_file(rank).open("ab") as log:
            return subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "recipes.launcher", str(folder / "job.json")],
                cwd=ROOT,
                env=self.environment(rank),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self, rank: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HANZO_ML_", "MLFLOW_"))}
        return {
            **inherited,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NODE_RANK": str(rank),
            "PET_NODE_RANK": str(rank),
            "POD_UID": uuid.uuid4().hex,
            "POD_NAME": f"pod-{rank}",
            "NODE_NAME": f"machine-{rank}",
            "HANZO_ML_GENERATION": "1",
            "HANZO_ML_RANK_0": "127.0.0.1",
            "HANZO_ML_NODES": str(self._nodes),
            "HANZO_ML_PROCESSES": str(self._processes),
            "HANZO_ML_API": self.cluster_job.server.url,
            "HANZO_ML_HEARTBEAT_PORT": str(self.heartbeat_port),
            "HANZO_ML_RENDEZVOUS_PORT": str(self.rendezvous_port),
            "MLFLOW_TRACKING_TOKEN": self.cluster_job.token,
            **self._variables,
        }

    def log_file(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"

    def output(self, rank: int) -> str:
        return self.log_file(rank).read_text(errors="replace")

    def describe(self) -> str:
        return "\n".join(f"--- node {rank}\n{self.output(rank)[-4000:]}" for rank in self.pods)

    def wait(self, seconds: float = LONG) -> list[int]:
        """Return the exit codes of all pods, by rank."""
        try:
            return [pod.wait(seconds) for pod in self.pods.values()]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.describe()) from None

    def wait_for(self, look: Callable[[], bool], *ranks: int) -> None:
        """Wait for a condition while all pods, or those of the given ranks, run."""
        end = time.monotonic() + LONG
        pods = [pod for rank, pod in self.pods.items() if not ranks or rank in ranks]
        while not look():
            assert time.monotonic() < end and all(pod.poll() is None for pod in pods), self.describe()
            time.sleep(0.02)

    def wait_for_output(self, text: str, *ranks: int) -> None:
        self.wait_for(lambda: all(text in self.output(rank) for rank in ranks or self.pods))

    def kill_launcher(self, rank: int) -> None:
        """Kill only the launcher process, as when a container ends."""
        self.pods[rank].kill()

    def freeze(self, rank: int) -> None:
        """Suspend a node: its connections stay open, but nothing responds."""
        for process_id in session(self.pods[rank].pid):
            os.kill(process_id, signal.SIGSTOP)

    def kill_all(self) -> None:
        """Kill all remaining processes, so that no test leaves any behind."""
        for pod in self.pods.values():
            if pod.poll() is None:
                for process_id in session(pod.pid):
                    try:
                        os.kill(process_id, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                pod.wait()
