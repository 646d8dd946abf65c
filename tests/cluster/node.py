"""A node: its namespaces with containerd, kubelet, kube-proxy and kube-router.

It has network, mount, host name and process namespaces. The first process of the process namespace is an idle shell. When
it ends, the kernel ends all others of the node, with its containers, at once: as when a machine loses power.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import cgroups, network, processes
from tests.cluster.build import Cache
from tests.cluster.certificates import Authority
from tests.cluster.control_plane import ControlPlane
from tests.cluster.images import PAUSE_IMAGE

STARTS_WITHIN = 60.0
KUBE_ROUTER_STARTS = 5
KUBE_ROUTER_READY = b"Starting network policy controller full sync"

INIT = """\
hostname {hostname}
mount -t tmpfs run /run
mkdir {namespaces}
for path in {private}; do
  mkdir -p $path {folder}/private$path
  mount --bind {folder}/private$path $path
done
touch {folder}/ready
while :; do sleep 3600 & wait $!; done
"""
"""bash reaps orphans too."""

PRIVATE = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/containers")
"""Paths that no setting of kubelet and CNI plugins changes: each node has its own there, and its own /run."""

CNI = """\
{{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
    "ipam": {{"type": "host-local", "dataDir": "{folder}/ipam", "ranges": [[{{"subnet": "{pods}"}}]],
             "routes": [{{"dst": "0.0.0.0/0"}}]}}}},
  {{"type": "portmap", "capabilities": {{"portMappings": true}}}}]}}
"""

# Without CAP_SYS_RESOURCE no process may lower its score for the OOM killer, and no pod would start.
CONTAINERD = """\
version = 3
root = "{folder}/containerd"
state = "{folder}/containerd-state"
[grpc]
  address = "{folder}/containerd.sock"
[plugins.'io.containerd.internal.v1.opt']
  path = "{folder}/opt"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{folder}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "/usr/sbin/runc"
      Root = "{folder}/runc"
      SystemdCgroup = false
"""

# syncFrequency: by default a Secret reaches a volume after a minute, and the webhooks of Kueue and JobSet wait for theirs.
KUBELET = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}, x509: {{clientCAFile: {pki}/ca.crt}}}}
authorization: {{mode: Webhook}}
clusterDNS: [{dns}]
clusterDomain: cluster.local
resolvConf: {folder}/resolv.conf
containerRuntimeEndpoint: unix://{folder}/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /{cgroup}
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
enforceNodeAllocatable: []
tlsCertFile: {pki}/{name}.crt
tlsPrivateKeyFile: {pki}/{name}.key
evictionHard: {{nodefs.available: "1%", imagefs.available: "1%", memory.available: "50Mi"}}
imageGCHighThresholdPercent: 100
nodeStatusUpdateFrequency: 5s
syncFrequency: 5s
podLogsDir: {folder}/pod-logs
"""


class Node:
    """One node of a cluster, by its number."""

    def __init__(self, cluster: str, number: int, control_plane: ControlPlane, cache: Cache) -> None:
        self.number = number
        self.name = f"node-{number}"
        self.namespace = f"{cluster}-{self.name}"
        self.folder = control_plane.folder / self.name
        self._cluster = cluster
        self._control_plane = control_plane
        self._cache = cache

    def connect(self, others: Sequence[Node]) -> None:
        """Connect the node to the bridge, with routes to and from the `others`."""
        network.attach_node(self._cluster, self.namespace, self.number, {node.number: node.namespace for node in others})
        self._write_configuration()

    def start(self, images: Sequence[Path]) -> None:
        """Start the node's programs with these images.

        kube-router starts later: it ends if the cluster does not know the node.
        """
        cgroups.create(self.namespace)
        self._start_init()
        self.start_program("containerd")
        socket = self.folder / "containerd.sock"
        self._wait_for(socket, "containerd")
        for image in images:
            self.import_image(image)
        for program in ("kube-proxy", "kubelet"):
            self.start_program(program)

    def import_image(self, archive: Path) -> None:
        """Import an image, replacing the one of that name.

        All unnamed images are removed too: each product image has 1.3 GB.
        """
        self._ctr("import", archive)
        images = [line.split() for line in self._ctr("list").splitlines()[1:]]
        named = {digest for name, _, digest, *_ in images if not name.startswith("sha256:")}
        unnamed = [name for name, _, digest, *_ in images if name.startswith("sha256:") and digest not in named]
        if unnamed:
            self._ctr("remove", *unnamed)

    def tag_image(self, image: str, name: str) -> None:
        """Add another name to an image."""
        self._ctr("tag", "--force", image, name)

    def kill(self) -> None:
        """End all processes of the node at once, and remove its state from the machine.

        Started again, it has an empty disk.
        """
        processes.kill(network.processes(self.namespace))  # its first process is one of them
        cgroups.remove(self.namespace)
        network.detach_node(self._cluster, self.namespace, self.number)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ctr(self, *arguments: str | Path) -> str:
        socket = self.folder / "containerd.sock"
        return self.run(self._cache.program("ctr"), f"--address={socket}", "--namespace=k8s.io", "images", *arguments)

    def start_program(self, name: str) -> None:
        """Start containerd, kubelet, kube-proxy or kube-router."""
        processes.start(name, [*self._inside, self._cache.program(name), *self._arguments(name)], self.folder)

    def start_kube_router(self) -> None:
        """Start kube-router, which enforces network policies.

        It ends at once where the node is not registered, and sometimes crashes at its start.
        """
        log = self.folder / "kube-router.log"
        for _ in range(KUBE_ROUTER_STARTS):
            begin = log.stat().st_size if log.exists() else 0
            self.start_program("kube-router")

            def is_ready(begin: int = begin) -> bool:
                return KUBE_ROUTER_READY in log.read_bytes()[begin:]

            def has_ended() -> bool:
                return processes.pid("kube-router", self.folder) is None

            processes.wait_until(lambda: is_ready() or has_ended(), STARTS_WITHIN, lambda: processes.tail(log), pause=0.2)
            if is_ready():
                return
        raise processes.NotReady(f"kube-router does not start:\n{processes.tail(log)}")

    def kill_program(self, name: str) -> None:
        """End one of the node's programs as a crash would; the pods continue."""
        starter = processes.pid(name, self.folder)  # it waits outside of the process namespace
        processes.kill([] if starter is None else processes.children(starter))

    def unplug(self) -> None:
        """Cut the node's network: all that runs on it continues without connections."""
        network.set_cable(self._cluster, self.number, "down")

    def plug_in(self) -> None:
        network.set_cable(self._cluster, self.number, "up")

    def run(self, *command: str | Path) -> str:
        """Run a command in the node's namespaces, and return its output."""
        done = subprocess.run([*self._inside, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def mount(self, source: Path, target: Path) -> None:
        """Mount a folder of the machine read-only on the node, replacing an earlier mount."""
        self.run("sh", "-c", 'while umount --lazy "$0" 2> /dev/null; do :; done', target)
        self.run("mount", "--bind", source, target)
        self.run("mount", "-o", "remount,bind,ro", target)

    @property
    def _inside(self) -> list[str]:
        starter = processes.pid("init", self.folder)
        shells = [] if starter is None else processes.children(starter)
        if not shells:
            raise processes.NotReady(f"{self.name} is not running")
        # The search path: containerd looks up its shim, which is in the same folder.
        path = (
            f"PATH={self._cache.program('containerd').parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        )
        return ["nsenter", f"--target={shells[0]}", "--mount", "--net", "--uts", "--ipc", "--pid", "env", path]

    def _start_init(self) -> None:
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        script = INIT.format(
            hostname=self.name, namespaces=network.NAMESPACES, folder=self.folder, private=" ".join(PRIVATE)
        )
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        processes.start("init", [*network.inside(self.namespace), *unshare, "bash", "-ec", script], self.folder)
        self._wait_for(ready, "init")

    def _wait_for(self, path: Path, program: str) -> None:
        log = self.folder / f"{program}.log"
        processes.wait_until(
            path.exists, STARTS_WITHIN, lambda: f"{self.name}: {program} starts not:\n{processes.tail(log)}"
        )

    def _write_configuration(self) -> None:
        (self.folder / "cni").mkdir(parents=True, exist_ok=True)
        pki = self._control_plane.pki
        Authority(pki).issue(
            self.name, f"system:node:{self.name}", group="system:nodes", hosts=(self.name, network.node_address(self.number))
        )
        self._control_plane.write_kubeconfig(self.folder / "kubeconfig", self.name)
        values = {
            "folder": self.folder,
            "pki": pki,
            "name": self.name,
            "cgroup": self.namespace,
            "dns": network.GATEWAY,
            "pods": network.pod_range(self.number),
            "pause": PAUSE_IMAGE,
        }
        for path, template in (
            ("cni/10-bridge.conflist", CNI),
            ("containerd.toml", CONTAINERD),
            ("kubelet.yaml", KUBELET),
            ("resolv.conf", "nameserver {dns}\n"),
        ):
            (self.folder / path).write_text(template.format(**values))

    def _arguments(self, program: str) -> list[str]:
        admin, name = f"--kubeconfig={self._control_plane.kubeconfig}", f"--hostname-override={self.name}"
        return {
            "containerd": [f"--config={self.folder}/containerd.toml"],
            "kube-proxy": [admin, name, "--proxy-mode=nftables", "--conntrack-max-per-core=0"],
            "kube-router": [
                admin,
                name,
                "--run-router=false",
                "--run-firewall=true",
                "--run-service-proxy=false",
                "--enable-cni=false",
                "--iptables-sync-period=10s",
                "--health-port=0",
                "--metrics-port=0",
            ],
            "kubelet": [
                name,
                f"--config={self.folder}/kubelet.yaml",
                f"--kubeconfig={self.folder}/kubeconfig",
                f"--root-dir={self.folder}/kubelet",
                f"--node-ip={network.node_address(self.number)}",
            ],
        }[program]
