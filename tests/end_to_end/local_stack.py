"""A stack with its own state folder and ports, driven by the command line."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from recipes.contracts.job import Job
from resources.stack.detached_process import is_running
from tests.support.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PORTS = {
    "HANZO_ML_SERVER_PORT": "api",
    "HANZO_ML_METRICS_PORT": "metrics",
    "HANZO_ML_ENGINE_PORT": "engine",
    "HANZO_ML_DAGSTER_PORT": "dagster",
    "HANZO_ML_DAGSTER_CODE_SERVER_PORT": "code",
}
LIMIT_SECONDS = 240.0
T = TypeVar("T")


def wait_until(what: str, look: Callable[[], T | None], seconds: float = LIMIT_SECONDS, every: float = 0.25) -> T:
    """Return the first true result of `look`; fail with what it waited for.

    Polling takes processor time from the stack: ten times a second used a third of a core.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := look():
            return answer
        time.sleep(every)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a stopped process has a pending signal."""
    (mask,) = re.findall(r"^ShdPnd:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@dataclass
class LocalStack:
    home: Path
    ports: dict[str, int] = field(default_factory=lambda: {variable: free_port() for variable in PORTS})
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))
    """One for all calls: a new one first reads all certificates."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of its ports."""
    store: Path | None = None
    """The object store, if it is outside of the state folder."""

    @property
    def environment(self) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HANZO_ML_")}
        if self.store is not None:
            clean["HANZO_ML_STORAGE_ENDPOINT"] = self.store.as_uri()
        ports = {name: str(port) for name, port in self.ports.items()}
        return {**clean, "HANZO_ML_HOME": str(self.home), **ports, **self.settings}

    def hanzo_ml(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from hanzo_ml.cli import main; main()", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        if check:
            assert done.returncode == 0, f"hanzo-ml {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    def url(self, variable: str) -> str:
        return f"http://127.0.0.1:{self.ports[variable]}"

    def get(self, path: str, **params: Any) -> Any:
        answer = self.http.get(self.url("HANZO_ML_SERVER_PORT") + path, params=params)
        answer.raise_for_status()
        return answer.json()

    def events(self, *types: str, key: str | None = None) -> list[dict[str, Any]]:
        found = self.get("/v1/events", limit=1000, type=list(types))["events"]
        return [event for event in found if key is None or event["key"] == key]

    def wait_for(self, type: str, key: str) -> dict[str, Any]:
        return wait_until(f"{type} of {key}", lambda: next(iter(self.events(type, key=key)), None))

    def submit(self, name: str, dataset: str, parameters: dict[str, Any]) -> str:
        config = self.home / f"{name}-{random.randrange(1 << 30)}.json"
        config.write_text(json.dumps({"name": name, "dataset": dataset, "parameters": parameters}))
        return str(json.loads(self.hanzo_ml("job", "submit", "--config", str(config), "--json").stdout)["id"])

    def wait_for_step(self, job: str, step: int) -> None:
        """Wait until the trainer has completed `step`."""
        log = self.home / "jobs" / job / "train" / "log.txt"

        def reached() -> bool:
            text = log.read_text(errors="replace") if log.is_file() else ""
            done = [
                int(line.split("step ")[1].split("/")[0])
                for line in text.splitlines()
                if " step " in line and " loss " in line
            ]
            return max(done, default=0) >= step

        wait_until(f"step {step} of {job}", reached, every=0.03)

    def wait_for_step_after(self, job: str, line: str, step: int) -> None:
        """Wait until the trainer has completed `step` after the last such line of its log."""
        log = self.trainer(job) / "log.txt"

        def reached() -> bool:
            _, there, text = log.read_text(errors="replace").rpartition(line)
            return bool(there) and f"step {step}/" in text

        wait_until(f"step {step} of {job} after '{line}'", reached, every=0.03)

    def wait_until_it_has_ended(self, job: str) -> None:
        """Wait until a cancelled job's processes have ended, with a checkpoint saved."""
        wait_until(f"the end of {job}", lambda: not is_running(self.trainer(job)))

    @contextmanager
    def standing_still(self, job: str) -> Iterator[int]:
        """Stop the trainer during the block, as a fast machine would finish training.

        Yields its process id.
        """
        trainer = self.pid(self.trainer(job))
        os.kill(trainer, signal.SIGSTOP)
        try:
            assert is_running(self.trainer(job)), f"the training of {job} had ended"
            yield trainer
        finally:
            os.kill(trainer, signal.SIGCONT)

    @contextmanager
    def paused_until_sigterm(self, job: str) -> Iterator[None]:
        """Stop the trainer until it has received the SIGTERM of what happens in the block.

        No step can complete before that.
        """
        with self.standing_still(job) as trainer:
            yield
            wait_until(f"SIGTERM to the trainer of {job}", lambda: is_pending(trainer, signal.SIGTERM))

    def pid(self, folder: Path) -> int:
        return int((folder / "pid.json").read_text())

    def trainer(self, job: str) -> Path:
        return self.home / "jobs" / job / "train"

    def service(self, name: str) -> Path:
        return self.home / "services" / name

    def processes(self) -> list[psutil.Process]:
        """List every process of the stack, also those that its services have started themselves."""

        def works_for_it(process: psutil.Process) -> bool:
            try:
                return process.environ().get("HANZO_ML_HOME") == str(self.home)
            except psutil.Error:
                return False

        return [process for process in psutil.process_iter() if works_for_it(process)]

    def run_workers(self) -> list[Path]:
        """List the folders of the live run workers."""
        return [path for path in (self.home / "run-workers").iterdir() if is_running(path)]

    def run_worker(self, job: str) -> Path:
        """Return the folder of the job's run worker.

        Others may be alive: those of follow-up runs of earlier jobs.
        """
        query = "query($tags: [ExecutionTag!]) { runsOrError(filter: {tags: $tags}) { ... on Runs { results { runId } } } }"
        body = {"query": query, "variables": {"tags": [{"key": "dagster/partition", "value": job}]}}
        answer = self.http.post(self.url("HANZO_ML_DAGSTER_PORT") + "/graphql", json=body).json()
        runs = {run["runId"] for run in answer["data"]["runsOrError"]["results"]}
        (worker,) = (path for path in self.run_workers() if path.name in runs)
        return worker

    def losses(self, job: str) -> list[tuple[int, float]]:
        """Return every training loss that the tracker has, duplicates included."""
        params = {"run_id": job, "metric_key": "train/loss", "max_results": 25000}
        points = self.get("/api/2.0/mlflow/metrics/get-history", **params)["metrics"]
        return sorted((int(point["step"]), float(point["value"])) for point in points)

    def adapter_sha256(self, job: str) -> str:
        """Return the hash of the final adapter's weights."""
        uri = self.get(f"/v1/jobs/{job}")["artifacts"]["adapter"]["uri"]
        files = json.loads((self.path(uri) / "manifest.json").read_text())["files"]
        return str(next(file["sha256"] for file in files if file["path"] == "adapter_model.safetensors"))

    def path(self, uri: str) -> Path:
        """Return the path of a logical folder."""
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        buckets = {"datasets": "hanzo-ml-datasets", "checkpoints": "hanzo-ml-checkpoints", "runs": "hanzo-ml-checkpoints"}
        name = buckets[key.split("/")[0]] if bucket == "hanzo-ml" else bucket
        return (self.store or self.home / "objects") / name / key

    def training_job(self, job: str) -> Job:
        return Job.model_validate_json((self.trainer(job) / "job.json").read_bytes())
