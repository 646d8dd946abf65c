"""The controllers of Kueue and JobSet: find the leader, and move it off a node.

Each is one pod, which a lost node keeps for 5 minutes. Until it is replaced, no Job can be created: its webhook is
unavailable.
"""

from functools import partial

from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

LEASES = {"jobset": "6d4f6a47.jobset.x-k8s.io", "kueue": "c1f6bfd2.kueue.x-k8s.io"}
LEADS_WITHIN = 300.0


def find_leader(cluster: Cluster, name: str) -> str:
    """Return the leading pod and its identity; empty while the controller's pod is not ready."""
    namespace = f"--namespace={name}-system"
    deployment = cluster.get("deployment", namespace, f"{name}-controller-manager")
    if not deployment["status"].get("readyReplicas"):
        return ""
    return str(cluster.get("lease", namespace, LEASES[name])["spec"].get("holderIdentity", ""))


def has_other_leader(cluster: Cluster, name: str, before: str) -> bool:
    return find_leader(cluster, name) not in ("", before)


def delete_leader(cluster: Cluster, name: str, leader: str) -> None:
    cluster.kubectl("delete", "pod", pod_of(leader), f"--namespace={name}-system", "--grace-period=0", "--force")


def move_controllers(cluster: Cluster, node: str) -> None:
    """Move the controllers to other nodes."""
    for name in LEASES:
        wait_until(partial(has_other_leader, cluster, name, ""), LEADS_WITHIN, lambda: "nobody leads")
        leader = find_leader(cluster, name)
        if cluster.get("pod", pod_of(leader), f"--namespace={name}-system")["spec"]["nodeName"] == node:
            cluster.kubectl("cordon", node)
            delete_leader(cluster, name, leader)
            wait_until(partial(has_other_leader, cluster, name, leader), LEADS_WITHIN, lambda: "nobody leads")
            cluster.kubectl("uncordon", node)


def pod_of(leader: str) -> str:
    return leader.partition("_")[0]
