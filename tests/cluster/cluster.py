"""A real Kubernetes cluster on this machine: start, use and removal.

All of it is in network namespaces, cgroups and one state folder, and the names derive from the folder's path. Remains of an
earlier process, however it ended, are removed before the next start.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import cgroups, dependencies, network, processes
from tests.cluster.build import Cache, compile_components, exclusive, missing_components, report
from tests.cluster.control_plane import ControlPlane
from tests.cluster.debian import require_machine
from tests.cluster.images import build_images
from tests.cluster.node import Node
from tests.cluster.product_images import TAG, build_product_images
from tests.cluster.storage import S3, Postgres

ROOT = Path(__file__).parents[2]
GPU = "nvidia.com/gpu"
NODES, GPUS = 3, 8
READY_WITHIN = 180.0
LOADED_IMAGES = "loaded-images.json"
FAKE = "kwok.x-k8s.io/node"
"""The annotation of nodes that kwok simulates."""


class Cluster:
    """One cluster, identified by its state folder.

    Any process can use the one that another started.
    """

    def __init__(self, state: Path | None = None, cache: Cache | None = None) -> None:
        self.state = (state or default_state()).absolute()
        self.cache = cache or Cache()
        self.namespace = "hc-" + hashlib.sha256(str(self.state).encode()).hexdigest()[:6]
        self.control_plane = ControlPlane(self.state, self.namespace, self.cache)
        self.s3 = S3(self.state, self.namespace, self.cache)
        self.postgres = Postgres(self.state, self.namespace)
        self._outside = network.open_current()

    @property
    def kubeconfig(self) -> Path:
        return self.control_plane.kubeconfig

    @property
    def address(self) -> str:
        """The address at which pods reach listeners in the cluster's namespace."""
        return network.GATEWAY

    @property
    def nodes(self) -> dict[str, Node]:
        """The nodes that have been started, by name."""
        numbers = sorted(int(path.name.removeprefix("node-")) for path in self.state.glob("node-*"))
        return {node.name: node for node in map(self._node, numbers)}

    def up(self, nodes: int = NODES, gpus: int = GPUS) -> None:
        """Compile what is missing, remove an earlier cluster, and start everything."""
        with self._locked():
            require_machine(compiler=bool(missing_components(self.cache)))
            compile_components(self.cache)
            images = build_images(self.cache)
            self._clear()
            self.state.mkdir(parents=True)
            report(f"starting {nodes} nodes in network namespace {self.namespace}, state in {self.state}")
            network.create_cluster_network(self.namespace)
            self.control_plane.prepare()
            self.s3.start()
            self.postgres.start()
            self.control_plane.start_api_server()
            self._write_kubectl()
            self._wait_for_api_server()
            self.control_plane.start_clients()
            for number in range(1, nodes + 1):
                self._node(number).connect(list(self.nodes.values()))
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda number: self._start_node(number, gpus, images), range(1, nodes + 1)))
            for name in ("jobset", "kueue"):
                manifests = configure_kueue(self.cache.manifests(name).read_text())
                self.kubectl("apply", "--server-side", "--filename=-", document=manifests)
            self.s3.create_buckets()
            self.postgres.wait_until_ready()
            for name in ("jobset", "kueue"):
                self.kubectl("rollout", "status", f"--namespace={name}-system", f"deployment/{name}-controller-manager",
                             f"--timeout={READY_WITHIN:.0f}s")  # fmt: skip
            report("ready")

    def down(self) -> None:
        with self._locked():
            self._clear()

    def is_running(self) -> bool:
        """Whether the API server responds that it is ready."""
        if not (self.kubeconfig.exists() and (network.NAMESPACES / self.namespace).exists()):
            return False
        return self._kubectl("get", "--raw", "/readyz").stdout.strip() == "ok"

    def entered(self) -> AbstractContextManager[None]:
        """Run this thread, and all that it starts, in the cluster's network."""
        return network.entered(self.namespace)

    def command(self, *command: str | Path) -> list[str]:
        """Return a command that runs in the cluster's network namespace."""
        return [*network.inside(self.namespace), *map(str, command)]

    def kubectl_command(self, *arguments: str) -> list[str]:
        """Return a kubectl command as administrator.

        All clusters have one address: each needs its own discovery cache.
        """
        options = [f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.state / 'kubectl-cache'}"]
        return self.command(self.cache.program("kubectl"), *options, *arguments)

    def kubectl(self, *arguments: str, document: str | None = None) -> str:
        """Run kubectl as administrator with `document` as its input; return its output."""
        done = self._kubectl(*arguments, document=document)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)} failed:\n{done.stderr}")
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self.kubectl("apply", "--server-side", "--filename=-", document=yaml.safe_dump_all(objects))

    def get(self, *arguments: str) -> Any:
        """Return the objects that `kubectl get` finds, as JSON."""
        return json.loads(self.kubectl("get", "--output=json", *arguments))

    def create_namespace(self, name: str, *, pod_security: str = "restricted", checkout: Path = ROOT) -> None:
        """Create a namespace with the claim `dependencies` on interpreter, packages and a checkout."""
        folder = self.state / "dependencies" / name
        for source in dependencies.sources(checkout):
            (folder / source).mkdir(parents=True, exist_ok=True)
        (folder / "checkout.path").write_text(str(checkout.resolve()))
        for node in self.nodes.values():
            mount_dependencies(node, folder)
        labels = {"pod-security.kubernetes.io/enforce": pod_security}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        self.apply(namespace, *dependencies.manifests(name, folder))

    def delete_namespace(self, name: str) -> None:
        self.kubectl("delete", "namespace", name, "--timeout=120s", "--ignore-not-found")
        self.kubectl("delete", "persistentvolume", f"{dependencies.CLAIM}-{name}", "--ignore-not-found")
        shutil.rmtree(self.state / "dependencies" / name, ignore_errors=True)

    def load_product_images(self, checkout: Path = ROOT, tag: str = TAG) -> dict[str, Path]:
        """Build control plane and engine from a checkout, and load them on all nodes.

        Nodes that are added later get them too. Returns the archives by the names of the images.
        """
        with network.switched(self._outside):  # the cluster's network has no route to a package index
            built = build_product_images(self.cache, checkout, tag)
        loaded = self._loaded_images()
        missing = [archive for name, archive in built.items() if loaded.get(name) != archive]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: [node.import_image(archive) for archive in missing], self.nodes.values()))
        known = {name: str(archive) for name, archive in (loaded | built).items()}
        (self.state / LOADED_IMAGES).write_text(json.dumps(known))
        return built

    def _loaded_images(self) -> dict[str, Path]:
        file = self.state / LOADED_IMAGES
        return {name: Path(archive) for name, archive in json.loads(file.read_text()).items()} if file.exists() else {}

    def require_nodes(self, count: int) -> None:
        """Start the nodes that are missing for a test that needs more than usual."""
        for number in range(len(self.nodes) + 1, count + 1):
            self.add_node(number)

    def add_node(self, number: int, gpus: int = GPUS) -> Node:
        """Start another node, or one that was killed."""
        self._node(number).connect(list(self.nodes.values()))
        return self._start_node(number, gpus, [*build_images(self.cache), *self._loaded_images().values()])

    def wait_for_node(self, name: str) -> None:
        """Wait until a node is Ready."""
        processes.wait_until(lambda: self.is_ready(name), READY_WITHIN, lambda: f"{name} is not Ready", pause=0.5)

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node at once.

        Its Node object stays, as when a machine loses power.
        """
        self.nodes[name].kill()

    def start_kwok(self, run_seconds: float = 1) -> None:
        """Have kwok simulate the nodes of `add_fake_nodes`, and run their pods.

        A pod of a Job completes after `run_seconds` and up to 5 s more, or as its annotation
        `pod-complete.stage.kwok.x-k8s.io/delay` says.
        """
        config = self.state / "kwok.yaml"
        config.write_text(yaml.safe_dump_all(read_stages(self.cache.manifests("kwok"), run_seconds)))
        arguments = [
            f"--kubeconfig={self.kubeconfig}",
            f"--config={config}",
            "--manage-all-nodes=false",
            f"--manage-nodes-with-annotation-selector={FAKE}=fake",
            "--node-lease-duration-seconds=10",  # renewed four times as often: a busy machine must not lose them
        ]
        processes.start("kwok", self.command(self.cache.program("kwok"), *arguments), self.state)

    def add_fake_nodes(self, count: int, gpus: int = GPUS, run_seconds: float = 1, taint: str = FAKE) -> None:
        """Add simulated nodes, whose pods do not really run.

        The taint keeps pods away that do not tolerate it.
        """
        self.stop_kwok()
        self.start_kwok(run_seconds)
        capacity = {"cpu": "96", "memory": "1Ti", "pods": "110", GPU: str(gpus)}
        self.apply(
            *(
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": f"fake-{number}", "annotations": {FAKE: "fake"}, "labels": {"type": "fake"}},
                    "spec": {"taints": [{"key": taint, "value": "fake", "effect": "NoSchedule"}]},
                    "status": {"capacity": capacity, "allocatable": capacity},
                }
                for number in range(1, count + 1)
            )
        )

    def remove_fake_nodes(self) -> None:
        self.kubectl("delete", "nodes", "--selector=type=fake")
        self.stop_kwok()

    def stop_kwok(self) -> None:
        pid = processes.pid("kwok", self.state)
        processes.kill([] if pid is None else [pid])

    def _node(self, number: int) -> Node:
        return Node(self.namespace, number, self.control_plane, self.cache)

    def _start_node(self, number: int, gpus: int, images: Sequence[Path]) -> Node:
        node = self._node(number)
        node.start(images)
        for folder in self.state.glob("dependencies/*"):
            mount_dependencies(node, folder)
        log = node.folder / "kubelet.log"
        processes.wait_until(
            lambda: self.is_ready(node.name),
            READY_WITHIN,
            lambda: f"{node.name} is not Ready:\n{processes.tail(log)}",
            pause=0.5,
        )
        node.start_program("kube-router")
        path = f"/status/capacity/{GPU.replace('/', '~1')}"  # the kubelet keeps unknown resources
        patch = json.dumps([{"op": "add", "path": path, "value": str(gpus)}])
        self.kubectl("patch", "node", node.name, "--subresource=status", "--type=json", f"--patch={patch}")
        node.start_kube_router()
        return node

    def is_ready(self, name: str) -> bool:
        """Whether a node is Ready."""
        template = '{.status.conditions[?(@.type=="Ready")].status}'
        return self._kubectl("get", "node", name, f"--output=jsonpath={template}").stdout == "True"

    def _wait_for_api_server(self) -> None:
        log = self.state / "apiserver.log"
        processes.wait_until(
            self.is_running, READY_WITHIN, lambda: f"the API server is not ready:\n{processes.tail(log)}", pause=0.5
        )

    def _kubectl(self, *arguments: str, document: str | None = None) -> subprocess.CompletedProcess[str]:
        command = self.kubectl_command(*arguments)
        return subprocess.run(command, input=document, capture_output=True, text=True, check=False)

    def _write_kubectl(self) -> None:
        """Write a kubectl for interactive use: STATE/kubectl."""
        script = self.state / "kubectl"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(self.kubectl_command())} "$@"\n')
        script.chmod(0o755)

    def _clear(self) -> None:
        """Remove all that carries this cluster's names, in any state."""
        nodes = {path.name for path in network.NAMESPACES.glob(f"{self.namespace}-node-*")}
        nodes |= {path.name for path in cgroups.HIERARCHIES.glob(f"*/{self.namespace}-node-*")}
        ourselves = {os.getpid(), os.getppid()}
        for namespace in [*nodes, self.namespace]:
            processes.kill(set(network.processes(namespace)) - ourselves)
            cgroups.remove(namespace)
            network.delete_network(namespace)
        unmount_all(self.state)
        shutil.rmtree(self.state, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time start or stop a cluster."""
        with exclusive(self.cache.folder / f"{self.namespace}.lock"):
            yield


def default_state() -> Path:
    """Return this checkout's state folder: clusters of two checkouts do not collide.

    HANZO_ML_TEST_CLUSTER names another.
    """
    if given := os.environ.get("HANZO_ML_TEST_CLUSTER"):
        return Path(given)
    return Path(tempfile.gettempdir()) / f"hanzo-ml-cluster-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"


def configure_kueue(manifests: str) -> str:
    """Have Kueue reconcile several JobSets at a time, as it does with Jobs.

    One by one, hundreds take minutes.
    """
    return re.sub(r"^( +)Job\.batch: (\d+)$", r"\g<0>\n\1JobSet.jobset.x-k8s.io: \2", manifests, flags=re.MULTILINE)


def read_stages(manifests: Path, run_seconds: float) -> list[dict[str, Any]]:
    """Return how kwok changes nodes and pods, with the duration of a Job's pod."""
    stages: list[dict[str, Any]] = list(yaml.safe_load_all(manifests.read_text()))
    for stage in stages:
        if stage["metadata"]["name"] == "pod-complete":
            shortest = round(run_seconds * 1000)
            stage["spec"]["delay"] |= {"durationMilliseconds": shortest, "jitterDurationMilliseconds": shortest + 5000}
    return stages


def mount_dependencies(node: Node, folder: Path) -> None:
    checkout = Path((folder / "checkout.path").read_text())
    for name, source in dependencies.sources(checkout).items():
        node.mount(source, folder / name)


def unmount_all(folder: Path) -> None:
    """Unmount what is mounted below a folder.

    Nodes mount in their own namespaces. A mount that is here all the same must not be deleted with its folder.
    """
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed([point for point in points if Path(point).is_relative_to(folder)]):
        subprocess.run(["umount", "--lazy", point], check=True)
