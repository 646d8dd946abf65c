"""NetworkPolicies that deny pods of jobs all but the required connections.

Pods of a namespace reach the API, the object store, DNS and the targets in `scheduler.egress`. Pods of a gang reach each
other: by a policy per gang if each organization has a namespace, otherwise by a rule for all jobs of the namespace.
"""

from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from recipes.contracts.job import BadConfiguration
from recipes.launch.pod import HEARTBEAT_PORT, RENDEZVOUS_PORT
from resources.compute.kubernetes.gang import DEFAULT_API, JOB_APP, JOB_LABEL, Gang, base_name
from resources.compute.kubernetes.pod_manifest import metadata
from resources.settings.scheduler import Egress
from resources.settings.settings import Settings

API = "networking.k8s.io/v1"
NAME = "hanzo-ml-jobs"
API_APP = "hanzo-ml"
"""Value of the label `app` on the pods of the API."""
DNS_PORT = 53
GANG_PORTS = [
    {"protocol": "TCP", "port": HEARTBEAT_PORT},
    {"protocol": "TCP", "port": RENDEZVOUS_PORT},
    {"protocol": "TCP", "port": 32768, "endPort": 60999},  # ephemeral ports, on which NCCL and gloo listen
]
STANDARD_PORTS = {"http": 80, "https": 443}


def gang_policy(gang: Gang) -> dict[str, Any]:
    """Return the policy that lets the pods of one job reach each other."""
    pods = {"podSelector": {"matchLabels": {JOB_LABEL: base_name(gang.job)}}}
    spec = {
        **pods,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [pods], "ports": GANG_PORTS}],
        "egress": [{"to": [pods], "ports": GANG_PORTS}],
    }
    return {"apiVersion": API, "kind": "NetworkPolicy", "metadata": metadata(gang), "spec": spec}


def namespace_policy(settings: Settings, namespace: str) -> dict[str, Any]:
    """Return the policy that denies pods all connections that not every job needs.

    Raises:
        BadConfiguration: no policy can express the configured address of the object store.
    """
    control_namespace = settings.dagster.run_pods.namespace
    jobs = {"podSelector": {"matchLabels": {"app": JOB_APP}}}
    gangs = [] if settings.scheduler.namespace_per_organization else [jobs]
    spec = {
        # If the control plane runs in the same namespace, its pods keep their connections.
        "podSelector": jobs["podSelector"] if namespace == control_namespace else {},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [peer], "ports": GANG_PORTS} for peer in gangs],
        "egress": [
            *({"to": [peer], "ports": GANG_PORTS} for peer in gangs),
            *api_rules(settings),
            *store_rules(settings),
            *map(egress_rule, settings.scheduler.egress),
            {"to": [namespace_peer("kube-system")], "ports": tcp_and_udp(DNS_PORT)},
        ],
    }
    return {"apiVersion": API, "kind": "NetworkPolicy", "metadata": {"name": NAME, "namespace": namespace}, "spec": spec}


def api_rules(settings: Settings) -> list[dict[str, Any]]:
    """Return egress rules for the API's pods, and its address if an IP address."""
    address = urlsplit(settings.scheduler.tracking_uri or DEFAULT_API)
    pods = namespace_peer(settings.dagster.run_pods.namespace, {"app": API_APP})
    rules = [{"to": [pods], "ports": [{"protocol": "TCP", "port": settings.server.port}]}]
    if (block := ip_block(address)) is not None:
        rules.append({"to": [block], "ports": [tcp_port(address)]})
    return rules


def store_rules(settings: Settings) -> list[dict[str, Any]]:
    """Return egress rules for the object store.

    Raises:
        BadConfiguration: its address is a name outside the cluster, and `scheduler.egress` is empty.
    """
    if settings.storage.endpoint is None:
        return []  # a folder of this machine
    address = urlsplit(settings.storage.endpoint)
    peer = ip_block(address) or service_peer(address)
    if peer is not None:
        return [{"to": [peer], "ports": [tcp_port(address)]}]
    if settings.scheduler.egress:
        return []
    raise BadConfiguration(
        f"no NetworkPolicy can name the object store at {address.hostname}: set scheduler.egress to its addresses, such as "
        f"[{{cidr: 203.0.113.0/24, ports: [{tcp_port(address)['port']}]}}]"
    )


def ip_block(address: SplitResult) -> dict[str, Any] | None:
    """Return the peer of an IP address; None for other addresses."""
    try:
        host = ip_address(address.hostname or "")
    except ValueError:
        return None
    return {"ipBlock": {"cidr": f"{host}/{host.max_prefixlen}"}}


def service_peer(address: SplitResult) -> dict[str, Any] | None:
    """Return all pods of a Service's namespace as a peer.

    A name with one label is in the pod's own namespace.
    """
    match (address.hostname or "").removesuffix(".").split("."):
        case [_]:
            return {"podSelector": {}}
        case [_, namespace, "svc", *_]:
            return namespace_peer(namespace)
    return None


def namespace_peer(namespace: str, pods: dict[str, str] | None = None) -> dict[str, Any]:
    peer: dict[str, Any] = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    return peer | ({"podSelector": {"matchLabels": pods}} if pods else {})


def tcp_port(address: SplitResult) -> dict[str, Any]:
    return {"protocol": "TCP", "port": address.port or STANDARD_PORTS.get(address.scheme, 443)}


def egress_rule(egress: Egress) -> dict[str, Any]:
    peer = {"ipBlock": {"cidr": egress.cidr}} if egress.cidr else namespace_peer(str(egress.namespace), egress.pods)
    ports = [port for number in egress.ports for port in tcp_and_udp(number)]
    return {"to": [peer], **({"ports": ports} if ports else {})}


def tcp_and_udp(port: int) -> list[dict[str, Any]]:
    return [{"protocol": protocol, "port": port} for protocol in ("TCP", "UDP")]
