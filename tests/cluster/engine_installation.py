"""An installation whose engine is a pulling Deployment, and a pod with continuous requests."""

import json
from collections.abc import Mapping
from typing import Any, Self

from tests.cluster.dependencies import CLAIM
from tests.cluster.images import DEPENDENCIES, JOB_IMAGE
from tests.cluster.installation import ENDS_WITHIN, Installation, wait_until
from tests.resources.serving.replica_process import Deployer

ENGINE = "engine"
PORT = 8043
TOKEN = "the-token-that-replicas-share-0123456789"
REPLICAS = 2

# Each request opens its own connection, so that the Service chooses a replica for each. Before the first answer, the pod's
# node may not know the Service's endpoints yet.
LOAD = """
import json, sys, threading, time, urllib.error, urllib.request
body = json.dumps({"model": "keeper", "prompt": "The lamp", "max_tokens": 8}).encode()
counts, lock = {}, threading.Lock()
def ask():
    while True:
        asked = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                json.load(answer)["choices"]
                found = answer.headers["X-Hanzo-Model-Version"]
        except Exception as error:
            with lock:
                if counts:
                    print(json.dumps({"failure": repr(error), "at": time.time()}), flush=True)
            time.sleep(0.2)
            continue
        with lock:
            counts[found] = counts.get(found, 0) + 1
for _ in range(3):
    threading.Thread(target=ask, daemon=True).start()
while True:
    time.sleep(1)
    with lock:
        print(json.dumps({"counts": counts}), flush=True)
"""


class EngineInstallation(Installation):
    """API and database as in `Installation`, and an engine of two replicas as pods.

    They are in their own namespace, as in an installation: jobs may not reach each other's Services.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        self.deployer = Deployer(self.database, self.store)
        self.cluster.create_namespace(self.pods)
        return self

    def __exit__(self, *problem: object) -> None:
        self.cluster.delete_namespace(self.pods)
        super().__exit__(*problem)

    @property
    def pods(self) -> str:
        return f"{self.name}-pods"

    def _config(self) -> dict[str, Any]:
        engine = {"mode": "pull", "host": "0.0.0.0", "url": f"http://{ENGINE}.{self.pods}.svc:{PORT}", "token": TOKEN}
        return super()._config() | {"engine": engine}

    def start_engine(self) -> None:
        labels = {"app": ENGINE}
        self._apply("v1", "Secret", "engine-token", stringData={"token": TOKEN})
        ports = [{"port": PORT, "targetPort": PORT}]
        self._apply("v1", "Service", ENGINE, spec={"selector": labels, "ports": ports})
        self._apply(
            "apps/v1",
            "Deployment",
            ENGINE,
            spec={
                "replicas": REPLICAS,
                "selector": {"matchLabels": labels},
                "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "template": {"metadata": {"labels": labels}, "spec": self._replica()},
            },
        )

    def start_load(self) -> None:
        url = f"http://{ENGINE}:{PORT}/v1/completions"
        container = {"command": ["python", "-c", LOAD, url], **hardened("load")}
        self._apply("v1", "Pod", "load", spec=pod(container))
        wait_until(lambda: sum(self.answers().values()) > 0, ENDS_WITHIN, self.describe_engine)

    def answers(self) -> dict[str, int]:
        """Count the answers that the load pod has received, by version."""
        return next((line["counts"] for line in reversed(self._load_log()) if "counts" in line), {})

    def failures(self) -> list[dict[str, Any]]:
        return [line for line in self._load_log() if "failure" in line]

    def wait_for_answers(self, count: int, version: str | None = None) -> None:
        """Wait for so many more answers."""

        def total() -> int:
            return sum(number for key, number in self.answers().items() if version in (None, key))

        before = total()
        wait_until(lambda: total() >= before + count, ENDS_WITHIN, self.describe_engine)

    def engine_pods(self) -> list[dict[str, Any]]:
        found = self.cluster.get("pods", f"--namespace={self.pods}", f"--selector=app={ENGINE}")["items"]
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def ready_pods(self) -> set[str]:
        return {each["metadata"]["name"] for each in self.engine_pods() if is_ready(each)}

    def restart_container(self, name: str) -> None:
        """End the program of a pod, and wait until its container runs again."""
        where = f"--namespace={self.pods}"
        self.cluster.kubectl("exec", name, where, "--", "python", "-c", "import os; os.kill(1, 15)")

        def restarts() -> int:
            return sum(each["restartCount"] for each in self.cluster.get("pod", name, where)["status"]["containerStatuses"])

        wait_until(lambda: restarts() == 1, ENDS_WITHIN, self.describe_engine)

    def wait_ready(self, *gone: str) -> None:
        """Wait until all replicas are ready and report, except deleted ones."""

        def holds() -> bool:
            reporting = {replica.id.partition(":")[0] for replica in self.deployer.replicas()}
            return len(self.ready_pods()) == REPLICAS and self.ready_pods() == reporting and not reporting & {*gone}

        wait_until(holds, ENDS_WITHIN, self.describe_engine)

    def wait_gone(self, *names: str) -> None:
        """Wait until deleted pods have drained and ended."""

        def holds() -> bool:
            found = self.cluster.get("pods", f"--namespace={self.pods}", f"--selector=app={ENGINE}")["items"]
            return not {each["metadata"]["name"] for each in found} & {*names}

        wait_until(holds, ENDS_WITHIN, self.describe_engine)

    def describe_engine(self) -> str:
        """Describe the engine for the message of a failed test."""
        where = f"--namespace={self.pods}"
        pods = self.cluster.kubectl("get", "pods", where, "--output=wide")
        logs = self.cluster._kubectl("logs", where, f"--selector=app={ENGINE}", "--tail=40", "--prefix").stdout
        return f"{pods}\n{logs}\n{self._load_log()[-5:]}\n{self.deployer.replicas()}\n{self.log('api')}"

    def _load_log(self) -> list[dict[str, Any]]:
        text = self.cluster._kubectl("logs", "load", f"--namespace={self.pods}").stdout
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def _replica(self) -> dict[str, Any]:
        token = {"secretKeyRef": {"name": "engine-token", "key": "token"}}
        settings = {"MODE": "pull", "HOST": "0.0.0.0", "PORT": str(PORT), "API_URL": self.url}
        variables = [{"name": f"HANZO_ML_ENGINE_{key}", "value": value} for key, value in settings.items()]
        container = {
            "command": ["python", "-m", "resources.serving.replica"],
            **hardened("engine"),
            "env": [
                *variables,
                {"name": "HANZO_ML_HOME", "value": "/cache"},
                {"name": "HANZO_ML_ENGINE_TOKEN", "valueFrom": token},
            ],
            "ports": [{"containerPort": PORT}],
            "readinessProbe": probe("/ready", periodSeconds=2, failureThreshold=2),
            "livenessProbe": probe("/health", periodSeconds=10, failureThreshold=6),
        }
        container["volumeMounts"] = [*container["volumeMounts"], {"name": "cache", "mountPath": "/cache"}]
        spec = pod(container)
        spec["volumes"] = [*spec["volumes"], {"name": "cache", "emptyDir": {}}]
        return spec | {"terminationGracePeriodSeconds": 150}

    def _apply(self, version: str, kind: str, name: str, **content: Any) -> None:
        metadata = {"name": name, "namespace": self.pods}
        self.cluster.apply({"apiVersion": version, "kind": kind, "metadata": metadata, **content})


def hardened(name: str) -> dict[str, Any]:
    """Return a container under the restricted Pod Security profile, with the dependencies mounted."""
    resources = {"cpu": "50m", "memory": "64Mi"}
    return {
        "name": name,
        "image": JOB_IMAGE,
        "resources": {"requests": resources, "limits": {"cpu": "2", "memory": "1500Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": CLAIM, "mountPath": DEPENDENCIES, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def pod(container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [dict(container)],
        "terminationGracePeriodSeconds": 1,
        "volumes": [
            {"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def probe(path: str, **options: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": PORT}, "timeoutSeconds": 10, **options}


def is_ready(pod: Mapping[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))
