"""An installation where each organization has a namespace.

Its controller has no more rights than its account.
"""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from resources.compute.base import JobRef
from resources.compute.kubernetes.namespaces import organization_namespace
from resources.compute.kubernetes.setup.permissions import SERVICE_ACCOUNT
from tests.cluster.cluster import Cluster
from tests.cluster.dependencies import CLAIM
from tests.cluster.installation import ENDS_WITHIN, wait_until
from tests.cluster.signed_in_installation import MEMORY, SignedInInstallation
from tests.cluster.simple_jobs import job as pods_of
from tests.cluster.simple_jobs import unique

OUTSIDE = "198.51.100.7"
"""An address outside of the cluster."""
OUTSIDE_PORT, LISTENER_PORT = 8443, 29500
LISTEN = f"""
import socket
server = socket.create_server(("", {LISTENER_PORT}))
while True:
    server.accept()[0].close()
"""
PROBE = """
import json, os, socket, time
targets, wanted = json.loads(os.environ["TARGETS"]), json.loads(os.environ["WANTED"])

def connects(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True

for _ in range(30):  # a network plugin takes some seconds to apply a policy
    found = {name: connects(*target) for name, target in targets.items()}
    if found == wanted:
        break
    time.sleep(1)
print(json.dumps(found))
"""
Target = tuple[str, int]


class TenantInstallation(SignedInInstallation):
    """Organizations are prepared by `hanzo-ml tenant apply`, which an administrator runs."""

    def __init__(self, cluster: Cluster, name: str, home: Path, scheduler: Mapping[str, Any]) -> None:
        self._account = home / "account.kubeconfig"
        own = {"namespace_per_organization": True, "kubeconfig": str(self._account)}
        super().__init__(cluster, name, home, gpus=2, scheduler={**own, **scheduler})
        self._tenants: list[str] = []

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        for namespace in self._tenants:
            self.cluster.delete_namespace(namespace)

    def start(self, program: str) -> None:
        if program == "controller":
            self._write_account()
        super().start(program)

    def client(self, organization: str, role: str = "ml-researcher") -> httpx.Client:
        token = self.iam.token(f"ann@{organization}", organization, role, exp=2_000_000_000)
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def namespace(self, organization: str) -> str:
        return organization_namespace(self.settings.scheduler, organization)

    def tenant(self, *words: str) -> str:
        return self._run("hanzo_ml", "tenant", *words, "--kubeconfig", str(self.cluster.kubeconfig))

    def apply_tenant(self, organization: str) -> str:
        """Prepare an organization, and give its pods what they import."""
        said = self.tenant("apply", organization)
        namespace = self.namespace(organization)
        if namespace not in self._tenants:
            self.cluster.create_namespace(namespace)
            self._tenants.append(namespace)
        return said

    def forget_tenant(self, organization: str) -> None:
        """Remove the volume of an organization's dependencies: its namespace was deleted."""
        namespace = self.namespace(organization)
        self._tenants.remove(namespace)
        self.cluster.kubectl("delete", "persistentvolume", f"{CLAIM}-{namespace}")
        shutil.rmtree(self.cluster.state / "dependencies" / namespace, ignore_errors=True)

    def submit(self, organization: str, code: str, **keys: Any) -> JobRef:
        """Submit a command of an organization's user, and start its supervisor.

        The supervisor submits it to the cluster.
        """
        document = {"name": "mine", "command": ["python", "-c", code], "resources": {"memory": MEMORY}, **keys}
        with self.client(organization) as client:
            answer = client.post("/v1/jobs", json=document)
        assert answer.status_code == 201, answer.text
        job = self.supervise(answer.json()["id"]).ref
        wait_until(lambda: self.jobs.find(job) is not None, ENDS_WITHIN, lambda: f"{job} is not submitted to the cluster")
        return job

    def show(self, organization: str, job: JobRef) -> dict[str, Any]:
        """Return the job as the API shows it to its organization."""
        with self.client(organization) as client:
            answer = client.get(f"/v1/jobs/{job.id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def detail(self, organization: str, job: JobRef) -> str:
        found = self.show(organization, job).get("cluster") or [{"detail": ""}]
        return str(found[0]["detail"])

    def wait_for_detail(self, organization: str, job: JobRef, words: str) -> str:
        wait_until(lambda: words in self.detail(organization, job), ENDS_WITHIN, lambda: self.describe(job))
        return self.detail(organization, job)

    def log_text(self, job: JobRef) -> str:
        return self.compute.read_log(job, 0).decode(errors="replace")

    def delete_policies(self, *organizations: str) -> None:
        for organization in organizations:
            self.cluster.kubectl("delete", "networkpolicies", "--all", f"--namespace={self.namespace(organization)}")

    def listen(self, organization: str) -> str:
        """Start a pod that listens where gangs do; return its address."""
        namespace, name = self.namespace(organization), unique("listens")
        self.cluster.apply(pods_of(name, namespace, ["python", "-c", LISTEN]))
        selector = (f"--namespace={namespace}", f"--selector=job-name={name}")

        def address() -> str:
            pods = self.cluster.get("pods", *selector)["items"]
            return str(pods[0]["status"].get("podIP", "")) if pods and pods[0]["status"]["phase"] == "Running" else ""

        wait_until(lambda: bool(address()), ENDS_WITHIN, lambda: self.cluster.kubectl("get", "pods", *selector))
        return address()

    def probe(self, organization: str, targets: Mapping[str, Target], wanted: Mapping[str, bool]) -> dict[str, bool]:
        """Return which targets an organization's pod can connect to.

        It stops when they are as wanted or after 30 tries.
        """
        namespace, name = self.namespace(organization), unique("probe")
        variables = {"TARGETS": json.dumps(targets), "WANTED": json.dumps(wanted)}
        env = [{"name": key, "value": value} for key, value in variables.items()]
        self.cluster.apply(pods_of(name, namespace, ["python", "-c", PROBE], env=env))
        where = f"--namespace={namespace}"
        self.cluster.kubectl("wait", where, f"job/{name}", "--for=condition=Complete", "--timeout=240s")
        said = self.cluster.kubectl("logs", where, f"job/{name}")
        return dict(json.loads(said.splitlines()[-1]))

    def program_token(self, organization: str, job: JobRef) -> str:
        """Return the token of a job's pods, which an administrator can read."""
        name = f"{self.jobs.get(job).name}-token"
        place = f"--namespace={self.namespace(organization)}"
        template = "--output=go-template={{.data.token | base64decode}}"
        return self.cluster.kubectl("get", "secret", name, place, template).strip()

    def _write_account(self) -> None:
        """Write a kubeconfig with the rights of the control plane's account."""
        token = self.cluster.kubectl("create", "token", SERVICE_ACCOUNT, "--namespace=hanzo", "--duration=4h").strip()
        self._account.write_text(self.cluster.kubeconfig.read_text())
        self._account.chmod(0o600)
        user = ("config", f"--kubeconfig={self._account}")
        self.cluster.kubectl(*user, "set-credentials", "account", f"--token={token}")
        self.cluster.kubectl(*user, "set-context", "--current", "--user=account")


@contextmanager
def outside_address() -> Iterator[Target]:
    """Listen at an address outside the cluster; this thread is in the cluster's network."""
    address = f"{OUTSIDE}/32"
    subprocess.run(["ip", "addr", "add", address, "dev", "lo"], check=True)
    try:
        with socket.create_server((OUTSIDE, OUTSIDE_PORT)):  # the kernel accepts connections
            yield OUTSIDE, OUTSIDE_PORT
    finally:
        subprocess.run(["ip", "addr", "del", address, "dev", "lo"], check=True)
