"""Load on an installation, as one of its pods: `python -m tests.cluster.install_load URL` until SIGTERM.

Writes metrics and artifacts and submits jobs through the API's Service. A request that fails is repeated, as clients do.
Each line of the output is a write that the API acknowledged, with the errors of its earlier attempts.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import httpx

MLFLOW = "/api/2.0/mlflow"
RETRY_SECONDS = 0.2
TIMEOUT_SECONDS = 30.0
ARTIFACT_SECONDS = 0.2
"""Pauses between two artifacts, and two jobs."""
JOB_SECONDS = 20.0
JOB_CODE = "print('done')"


class Load:
    """Writers of one run, each in a thread."""

    def __init__(self, url: str, token: str) -> None:
        self.stopped = threading.Event()
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT_SECONDS, trust_env=False
        )
        created = self._http.post(f"{MLFLOW}/runs/create", json={"experiment_id": "0", "start_time": 1}).raise_for_status()
        info = created.json()["run"]["info"]
        self.run_id = info["run_id"]
        self._artifacts = info["artifact_uri"].removeprefix("mlflow-artifacts:").strip("/")

    def run(self) -> None:
        report({"kind": "run", "id": self.run_id, "artifacts": self._artifacts})
        writers = (("metric", self.log_metric, 0.0), ("artifact", self.put_artifact, ARTIFACT_SECONDS),
                   ("job", self.submit_job, JOB_SECONDS))  # fmt: skip
        threads = [threading.Thread(target=self._write, args=each) for each in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def log_metric(self, number: int) -> httpx.Response:
        point = {"key": "load", "value": number, "step": number, "timestamp": int(time.time() * 1000)}
        return self._http.post(f"{MLFLOW}/runs/log-batch", json={"run_id": self.run_id, "metrics": [point]})

    def put_artifact(self, number: int) -> httpx.Response:
        path = f"/api/2.0/mlflow-artifacts/artifacts/{self._artifacts}/{number}.txt"
        return self._http.put(path, content=artifact_content(number))

    def submit_job(self, number: int) -> httpx.Response:
        document = {
            "name": f"load-{number}",
            "command": ["python", "-c", JOB_CODE],
            "resources": {"cpu": 1, "memory": "128Mi"},
        }
        return self._http.post("/v1/jobs", json=document, headers={"Idempotency-Key": f"{self.run_id}-{number}"})

    def _write(self, kind: str, send: Callable[[int], httpx.Response], pause: float) -> None:
        for number in itertools.count():
            failures: list[str] = []
            while True:
                try:
                    answer = send(number)
                    if answer.status_code < 500:
                        break
                    failures.append(str(answer.status_code))
                except httpx.TransportError as problem:
                    failures.append(type(problem).__name__)
                time.sleep(RETRY_SECONDS)
            answer.raise_for_status()
            more = {"id": answer.json()["id"]} if kind == "job" else {}
            report({"kind": kind, "number": number, "failures": failures, **more})
            if self.stopped.wait(pause):
                return


def artifact_content(number: int) -> bytes:
    return f"artifact {number}\n".encode() * 100


def report(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    load = Load(sys.argv[1], os.environ["TOKEN"])
    signal.signal(signal.SIGTERM, lambda *_: load.stopped.set())
    load.run()
    report({"kind": "end"})
