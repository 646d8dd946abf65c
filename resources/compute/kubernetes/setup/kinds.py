"""Kinds of the objects that prepare a cluster for jobs."""

from collections.abc import Mapping
from typing import Any

from resources.compute.kubernetes.cluster import Kind

NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
SECRET = Kind("v1", "Secret", "secrets")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
PLURALS = {
    "Namespace": "namespaces",
    "ResourceQuota": "resourcequotas",
    "LimitRange": "limitranges",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "NetworkPolicy": "networkpolicies",
    "ResourceFlavor": "resourceflavors",
    "ClusterQueue": "clusterqueues",
    "LocalQueue": "localqueues",
    "WorkloadPriorityClass": "workloadpriorityclasses",
    "PriorityClass": "priorityclasses",
    "Queue": "queues",
}


def setup_kind(item: Mapping[str, Any]) -> Kind:
    """Return the kind of an object rendered for a cluster."""
    return Kind(item["apiVersion"], item["kind"], PLURALS[item["kind"]], "namespace" in item["metadata"])
