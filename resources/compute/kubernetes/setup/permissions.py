"""Least-privilege permissions of the control plane and the Roles that grant them."""

from dataclasses import dataclass
from typing import Any

from resources.compute.kubernetes.cluster import (
    CONFIG_MAP,
    EVENT,
    JOB,
    NODE,
    POD,
    SECRET,
    WORKLOAD,
    WORKLOAD_PRIORITY_CLASS,
    Kind,
)
from resources.compute.kubernetes.submission import GANG_KINDS, created_kinds
from resources.settings.scheduler import Scheduler

ROLE = "hanzo-ml-scheduler"
SERVICE_ACCOUNT = "hanzo-ml"
"""Service account of the control plane, in the namespace `dagster.run_pods.namespace`."""
RBAC = "rbac.authorization.k8s.io"
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
"""Labels of a namespace that enforce the restricted profile: no root, no privileges, no host network or paths."""


@dataclass(frozen=True)
class Permission:
    """Verbs on one resource: in the jobs' namespace, or in all of them."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    cluster_wide: bool = False

    @property
    def rule(self) -> dict[str, list[str]]:
        """Rule of a Role."""
        return {"apiGroups": [self.group], "resources": [self.resource], "verbs": list(self.verbs)}


def permission(kind: Kind, *verbs: str, cluster_wide: bool = False, subresource: str = "") -> Permission:
    group = kind.api_version.rpartition("/")[0]
    return Permission(group, "/".join(filter(None, (kind.plural, subresource))), verbs, cluster_wide)


def required_permissions(scheduler: Scheduler) -> list[Permission]:
    """Return the permissions of the controller.

    Secrets are written and never read; watches cover the namespaces of all organizations.
    """
    gang = GANG_KINDS[scheduler.gang_backend]
    watched = (gang[0], POD, CONFIG_MAP, NODE, *([WORKLOAD] if scheduler.gang_backend == "kueue" else []))
    return [
        *(permission(kind, "list", "watch", cluster_wide=True) for kind in watched),
        *(permission(kind, "create", "get", "delete") for kind in (*created_kinds(scheduler), CONFIG_MAP)),
        *([permission(WORKLOAD_PRIORITY_CLASS, "get", cluster_wide=True)] if scheduler.gang_backend == "kueue" else []),
        *([permission(JOB, "create")] if JOB not in gang else []),  # the dry run of a JobSet's Job
        permission(SECRET, "create", "delete"),
        permission(POD, "delete"),
        permission(POD, "patch", subresource="status"),  # for pods on lost nodes
        permission(POD, "get", subresource="log"),
        permission(EVENT, "list"),
    ]


def render_account(scheduler: Scheduler, control_namespace: str) -> list[dict[str, Any]]:
    """Render the control plane's namespace, service account and ClusterRole."""
    metadata = {"name": control_namespace, "labels": dict(RESTRICTED)}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": SERVICE_ACCOUNT, "namespace": control_namespace},
        },
        *role("ClusterRole", {"name": ROLE}, required_permissions(scheduler), control_namespace),
    ]


def render_role(scheduler: Scheduler, namespace: str, control_namespace: str) -> list[dict[str, Any]]:
    """Render the control plane's Role in a namespace of jobs."""
    return role("Role", {"name": ROLE, "namespace": namespace}, required_permissions(scheduler), control_namespace)


def role(kind: str, metadata: dict[str, str], needed: list[Permission], control_namespace: str) -> list[dict[str, Any]]:
    """Return a role with the permissions of its kind, bound to the control plane's account."""
    rules = [each.rule for each in needed if each.cluster_wide is (kind == "ClusterRole")]
    return [
        {"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": ROLE},
            "subjects": [{"kind": "ServiceAccount", "name": SERVICE_ACCOUNT, "namespace": control_namespace}],
        },
    ]
