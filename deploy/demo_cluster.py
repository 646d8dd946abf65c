"""`make demo-cluster`: install Hanzo ML on the cluster of KUBECONFIG and run the demo.

The demo covers everything from an empty cluster to a served and proved model: create keys, apply `overlays/demo` and the
queues, wait, upload the base model, run the demo. `make demo-cluster-down` removes everything. The cluster needs Kueue and
JobSet.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import jwt
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from rich.console import Console

from hanzo_ml.cli.connection import Refused
from hanzo_ml.demo import MODEL, Chain, run_chain
from recipes.contracts.recipe import Recipe
from recipes.export.base_model import resolve_base_model
from recipes.storage.artifact_store import Store
from resources.settings.settings import Settings

OVERLAY = Path(__file__).resolve().parent / "kubernetes" / "overlays" / "demo"
NAMESPACE = "hanzo"
RECIPE = "smollm2-135m-lora"
"""Recipe of the demo's model."""
SECRET, SIGN_IN, SIGN_IN_KEY = "hanzo-ml-secrets", "demo-sign-in", "demo-sign-in-key"
READY_SECONDS = 600
END_SECONDS = 60
TOKEN_SECONDS = 12 * 3600
CONNECT_SECONDS = 30.0
MISSING = "NotFound"


@dataclass(frozen=True)
class DemoCluster:
    """One installation of the demo.

    Args:
        kubectl: command with administrator access to the cluster.
        overlay: the overlay to apply.
        config: its configuration file.
        keys: values of the Secret that replace generated ones.
    """

    kubectl: Sequence[str] = ("kubectl",)
    overlay: Path = OVERLAY
    config: Path = OVERLAY / "config.yaml"
    keys: Mapping[str, str] = field(default_factory=dict)

    def apply(self, console: Console) -> None:
        """Apply this checkout's installation; existing keys, database and objects are kept."""
        self.run("apply", "--filename=-", document=yaml.safe_dump_all(self._objects("Namespace")))  # needed by the keys
        self._create_keys()
        self.run("apply", f"--kustomize={self.overlay}")
        console.print("  applied", highlight=False)
        self.run("apply", "--filename=-", document=self.render_queues())

    def wait_until_ready(self, console: Console, seconds: int = READY_SECONDS) -> None:
        """Wait for all Deployments. Raises Refused with the state of pods that are late."""
        started = time.monotonic()
        for name in self._names("Deployment"):
            left = max(1, seconds - int(time.monotonic() - started))
            with console.status(f"waiting for {name}"):
                found = self.try_run("rollout", "status", f"deployment/{name}", self._here, f"--timeout={left}s")
            if found.returncode:
                raise Refused(f"{name} is not ready after {seconds} s:\n{self.describe()}")
            console.print(f"  {name:<18} ready after {time.monotonic() - started:.0f} s", highlight=False)

    def remove(self) -> None:
        """Remove everything, including data."""
        self._end_pods()
        self.run("delete", "--filename=-", "--ignore-not-found", "--wait=false", document=self.render_queues())
        self.run("delete", f"--kustomize={self.overlay}", "--ignore-not-found", "--timeout=5m")

    @contextmanager
    def connected(self, *ports: tuple[str, int]) -> Iterator[list[str]]:
        """Yield local URLs of Services of the installation while the block runs."""
        with ExitStack() as stack:
            yield [stack.enter_context(self._forwarded(service, port)) for service, port in ports]

    def client_environment(self, api: str) -> dict[str, str]:
        """Return the command line's variables for a signed-in administrator."""
        return {"HANZO_ML_TRACKING_URI": api, "MLFLOW_TRACKING_TOKEN": self.sign_token()}

    def sign_token(self, user: str = "demo", organization: str = "default", role: str = "ml-admin") -> str:
        pem = self._read_secret(SIGN_IN_KEY, "key")
        now, settings = int(time.time()), self.settings
        claims = {
            "iss": settings.auth.issuer,
            "aud": settings.auth.audience,
            settings.auth.user_claim: user,
            settings.auth.organization_claim: organization,
            settings.auth.roles_claim: [role],
            "iat": now,
            "nbf": now - 60,
            "exp": now + TOKEN_SECONDS,
        }
        return jwt.encode(claims, pem, algorithm="ES256", headers={"kid": "demo"})

    @contextmanager
    def object_store(self) -> Iterator[Store]:
        """Yield the installation's object store while the block runs."""
        keys = {
            "AWS_ACCESS_KEY_ID": self._read_secret(SECRET, "storage-access-key"),
            "AWS_SECRET_ACCESS_KEY": self._read_secret(SECRET, "storage-secret-key"),
        }
        with self.connected(("s3", 7070)) as [endpoint]:
            yield Store(self.settings.store.model_copy(update={"root": endpoint}), keys)

    @property
    def settings(self) -> Settings:
        return Settings.load({"HANZO_ML_CONFIG": str(self.config)})

    def render_queues(self) -> str:
        """Return the output of `hanzo-ml cluster render` for the installation's settings."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HANZO_ML_")}
        command = [sys.executable, "-m", "hanzo_ml", "cluster", "render"]
        done = subprocess.run(
            command,
            env=environment | {"HANZO_ML_CONFIG": str(self.config)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Refused(done.stderr.strip())
        return done.stdout

    def describe(self) -> str:
        """List the pods, with recent events and logs of those that are not ready."""
        pods = json.loads(self.run("get", "pods", self._here, "--output=json"))["items"]
        lines = [self.try_run("get", "pods", self._here, "--output=wide").stdout]
        for pod in pods:
            conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions") or ()}
            if conditions.get("Ready") != "True":
                name = pod["metadata"]["name"]
                log = self.try_run("logs", name, self._here, "--all-containers", "--tail=15", "--prefix")
                events = self.try_run("events", f"--for=pod/{name}", self._here)
                lines += [f"--- {name}", events.stdout[-1500:], log.stdout[-3000:]]
        return "\n".join(lines)

    def run(self, *arguments: str, document: str | None = None) -> str:
        """Return the output of a kubectl command. Raises Refused with its error."""
        done = self.try_run(*arguments, document=document)
        if done.returncode:
            raise Refused(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def try_run(self, *arguments: str, document: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [*self.kubectl, *arguments]
        return subprocess.run(command, input=document, capture_output=True, text=True, check=False)

    def _end_pods(self) -> None:
        """End all pods without their grace period.

        A training pod would save a checkpoint, for up to five minutes, to a store that is removed with it. The control plane
        ends first: its controller would recreate a deleted JobSet. Jobs are deleted without their pods, because a kubelet
        that has begun to wait for a grace period does not shorten it.
        """
        for namespace in sorted(self._names("Namespace"), key=lambda name: name != NAMESPACE):
            here = f"--namespace={namespace}"
            self.try_run("delete", "deployments", "--all", here, "--wait=false")
            self.try_run("delete", "jobsets,jobs", "--all", here, "--cascade=orphan", "--wait=false")
            self.try_run("delete", "pods", "--all", here, "--now", f"--timeout={END_SECONDS}s")

    @property
    def _here(self) -> str:
        return f"--namespace={NAMESPACE}"

    def _objects(self, kind: str) -> list[dict[str, Any]]:
        """Return the overlay's objects of one kind."""
        objects = yaml.safe_load_all(self.run("kustomize", str(self.overlay)))
        return [item for item in objects if item["kind"] == kind]

    def _names(self, kind: str) -> list[str]:
        return [str(item["metadata"]["name"]) for item in self._objects(kind)]

    def _create_keys(self) -> None:
        """Create the keys of all services and the token signing key, unless they exist."""
        if self._exists("secret", SECRET):
            return
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = json.loads(ECAlgorithm.to_jwk(key.public_key())) | {"kid": "demo", "use": "sig", "alg": "ES256"}
        password = secrets.token_hex(16)
        values = {
            "database-url": f"postgresql://hanzo:{password}@postgres.{NAMESPACE}.svc:5432/hanzo_ml",
            "postgres-password": password,
            "storage-access-key": secrets.token_hex(10),
            "storage-secret-key": secrets.token_hex(20),
            "engine-token": secrets.token_hex(32),
            **self.keys,
        }
        objects = [
            self._object("ConfigMap", SIGN_IN, data={"jwks.json": json.dumps({"keys": [public]})}),
            self._object("Secret", SIGN_IN_KEY, stringData={"key": private.decode()}),
            self._object("Secret", SECRET, stringData=values),  # created last, so its existence implies the others'
        ]
        self.run("apply", "--server-side", "--filename=-", document=yaml.safe_dump_all(objects))

    def _object(self, kind: str, name: str, **content: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app.kubernetes.io/part-of": "hanzo-ml"}}
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **content}

    def _exists(self, kind: str, name: str) -> bool:
        found = self.try_run("get", kind, name, self._here, "--output=name")
        if found.returncode and MISSING not in found.stderr:
            raise Refused(found.stderr.strip())
        return found.returncode == 0

    def _read_secret(self, name: str, key: str) -> str:
        template = f"--template={{{{index .data {json.dumps(key)} | base64decode}}}}"
        return self.run("get", "secret", name, self._here, "--output=go-template", template)

    @contextmanager
    def _forwarded(self, service: str, port: int) -> Iterator[str]:
        command = [*self.kubectl, "port-forward", f"service/{service}", f":{port}", self._here]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                assert process.stdout is not None
                first = process.stdout.readline()  # "Forwarding from 127.0.0.1:40123 -> 8057"
                if "127.0.0.1:" not in first:
                    raise Refused(f"cannot connect to the Service {service}: {first.strip()}")
                yield f"http://127.0.0.1:{first.split('127.0.0.1:')[1].split()[0]}"
            finally:
                process.kill()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def wait_for_api(api: str) -> None:
    """Wait until the API is ready. Raises Refused after a timeout."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{api}/ready", trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise Refused(f"the API at {api} is not ready")


def up(cluster: DemoCluster, console: Console) -> None:
    """Install Hanzo ML and run the demo."""
    console.rule("1  the installation")
    cluster.apply(console)
    cluster.wait_until_ready(console)
    # Pods of jobs have no internet access.
    with (
        console.status("uploading the base model to the object store"),
        TemporaryDirectory() as scratch,
        cluster.object_store() as store,
    ):
        resolve_base_model(Recipe.named(RECIPE).base_model, store, Path(scratch))
    with cluster.connected(("hanzo-ml", 8057), ("engine", 8043)) as [api, engine]:
        wait_for_api(api)
        with environment(cluster.client_environment(api)):
            run_chain(console, Chain(engine, {"name": MODEL, "model": MODEL}))
    console.rule()
    console.print(
        f"  kubectl -n {NAMESPACE} port-forward service/hanzo-ml 8057    leads to the API\n"
        "  export HANZO_ML_TRACKING_URI=http://127.0.0.1:8057 MLFLOW_TRACKING_TOKEN=$(make demo-cluster-token)\n"
        "  `make demo-cluster-down` removes everything."
    )


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m deploy.demo_cluster", description="The demo on the cluster of KUBECONFIG.")
    parser.add_argument("command", choices=("up", "token", "down"), help="install and run, print a token, or remove")
    parser.add_argument(
        "--overlay",
        type=Path,
        default=OVERLAY,
        metavar="DIR",
        help="folder with kustomization.yaml and config.yaml, such as one with images of your registry",
    )
    chosen = parser.parse_args(arguments)
    config = chosen.overlay / "config.yaml"
    if not config.is_file():
        parser.error(f"{config} is missing: an overlay has kustomization.yaml and config.yaml, as {OVERLAY} does")
    console, cluster = Console(highlight=False), DemoCluster(overlay=chosen.overlay, config=config)
    try:
        match chosen.command:
            case "up":
                up(cluster, console)
            case "token":
                print(cluster.sign_token())
            case "down":
                cluster.remove()
    except (Refused, httpx.TransportError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
