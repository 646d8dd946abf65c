"""The Kubernetes control plane as processes in the cluster's namespace.

It has etcd, API server, controller manager, scheduler and DNS.
"""

from __future__ import annotations

from pathlib import Path

from tests.cluster import processes
from tests.cluster.build import Cache
from tests.cluster.certificates import Authority
from tests.cluster.network import GATEWAY, KUBERNETES_SERVICE, SERVICES, inside

ETCD = "http://127.0.0.1:2379"
API_SERVER = ("etcd", "apiserver")
ADMIN = "admin"
PROXY = "front-proxy"
"""The user as which the API server forwards requests to other servers, such as Kueue's for the order of its queues."""

COREFILE = """\
.:53 {{
    bind {address}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig} {context}
        ttl 5
    }}
    cache 5
}}
"""
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: {context}, cluster: {{server: "https://{address}:6443", certificate-authority: {pki}/ca.crt}}}}]
users: [{{name: {user}, user: {{client-certificate: {pki}/{user}.crt, client-key: {pki}/{user}.key}}}}]
contexts: [{{name: {context}, context: {{cluster: {context}, user: {user}}}}}]
current-context: {context}
"""


class ControlPlane:
    """Programs that can be killed and restarted one by one."""

    def __init__(self, folder: Path, namespace: str, cache: Cache) -> None:
        self.folder = folder
        self.kubeconfig = folder / "admin.kubeconfig"
        self._namespace = namespace
        self._cache = cache

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    def prepare(self) -> None:
        """Write certificates and configuration files."""
        authority = Authority(self.pki)
        authority.issue_key_pair("service-accounts")
        names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
        authority.issue("apiserver", "kube-apiserver", hosts=(GATEWAY, "127.0.0.1", KUBERNETES_SERVICE, *names))
        authority.issue(ADMIN, ADMIN, group="system:masters")
        Authority(self.pki / PROXY).issue(PROXY, PROXY)
        self.write_kubeconfig(self.kubeconfig, ADMIN)
        corefile = COREFILE.format(address=GATEWAY, kubeconfig=self.kubeconfig, context=self._namespace)
        (self.folder / "Corefile").write_text(corefile)

    def write_kubeconfig(self, path: Path, user: str) -> None:
        """Write the kubeconfig of a user whose certificate is in `pki`."""
        path.write_text(KUBECONFIG.format(context=self._namespace, address=GATEWAY, pki=self.pki, user=user))

    def start_api_server(self) -> None:
        for name in API_SERVER:
            self.start(name)

    def start_clients(self) -> None:
        """Start the programs that use the API server.

        Controller manager and scheduler exit if it does not answer yet.
        """
        for name in self.commands():
            if name not in API_SERVER:
                self.start(name)

    def start(self, name: str) -> None:
        program, *arguments = self.commands()[name]
        processes.start(name, [*inside(self._namespace), self._cache.program(program), *arguments], self.folder)

    def kill(self, name: str) -> None:
        """End a program as a crash would."""
        pid = processes.pid(name, self.folder)
        processes.kill([] if pid is None else [pid])

    def commands(self) -> dict[str, list[str]]:
        config = f"--kubeconfig={self.kubeconfig}"
        authentication = [f"--{kind}-kubeconfig={self.kubeconfig}" for kind in ("authentication", "authorization")]
        controller = [config, *authentication, "--bind-address=127.0.0.1", "--leader-elect=false"]
        account_key = f"{self.pki}/service-accounts.key"
        return {
            "etcd": [
                "etcd",
                f"--data-dir={self.folder}/etcd",
                f"--listen-client-urls={ETCD}",
                f"--advertise-client-urls={ETCD}",
                "--listen-peer-urls=http://127.0.0.1:2380",
                "--unsafe-no-fsync",
            ],
            "apiserver": [
                "kube-apiserver",
                f"--etcd-servers={ETCD}",
                "--bind-address=0.0.0.0",
                f"--advertise-address={GATEWAY}",
                "--secure-port=6443",
                f"--tls-cert-file={self.pki}/apiserver.crt",
                f"--tls-private-key-file={self.pki}/apiserver.key",
                f"--client-ca-file={self.pki}/ca.crt",
                f"--kubelet-client-certificate={self.pki}/{ADMIN}.crt",
                f"--kubelet-client-key={self.pki}/{ADMIN}.key",
                "--kubelet-preferred-address-types=InternalIP",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={self.pki}/service-accounts.pub",
                f"--service-account-signing-key-file={account_key}",
                "--authorization-mode=Node,RBAC",
                f"--service-cluster-ip-range={SERVICES}",
                "--allow-privileged=true",
                f"--requestheader-client-ca-file={self.pki}/{PROXY}/ca.crt",
                f"--requestheader-allowed-names={PROXY}",
                "--requestheader-username-headers=X-Remote-User",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                f"--proxy-client-cert-file={self.pki}/{PROXY}/{PROXY}.crt",
                f"--proxy-client-key-file={self.pki}/{PROXY}/{PROXY}.key",
                "--enable-aggregator-routing=true",  # webhooks by endpoint: there is no kube-proxy in this namespace
            ],
            "controller-manager": [
                "kube-controller-manager",
                *controller,
                f"--service-account-private-key-file={account_key}",
                f"--root-ca-file={self.pki}/ca.crt",
                "--use-service-account-credentials=true",
                "--allocate-node-cidrs=false",
                "--node-monitor-grace-period=20s",
            ],
            "scheduler": ["kube-scheduler", *controller],
            "coredns": ["coredns", "-conf", f"{self.folder}/Corefile"],
        }
