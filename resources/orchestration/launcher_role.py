"""Kubernetes accounts and permissions for run pods: Dagster's processes create them, the pods themselves need none."""

from typing import Any

from resources.settings.sections import RunPods

DAGSTER_ACCOUNT = "hanzo-ml-dagster"
"""Service account of Dagster's daemon, code server and web server: each of them may start or end a run."""
ROLE = "hanzo-ml-run-launcher"
RULES = (
    ("batch", ("jobs",), ("create", "get", "list", "delete")),
    ("", ("pods",), ("get", "list", "delete")),
    ("", ("pods/log", "events"), ("get", "list")),  # what Dagster shows of a worker that failed
)


def launcher_objects(pods: RunPods) -> list[dict[str, Any]]:
    """Service accounts, Role and RoleBinding in the namespace of the control plane."""

    def metadata(name: str) -> dict[str, str]:
        return {"name": name, "namespace": pods.namespace}

    account = {"kind": "ServiceAccount", "name": DAGSTER_ACCOUNT, "namespace": pods.namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(pods.service_account)},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(DAGSTER_ACCOUNT)},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata(ROLE),
            "rules": [
                {"apiGroups": [group], "resources": list(kinds), "verbs": list(verbs)} for group, kinds, verbs in RULES
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata(ROLE),
            "subjects": [account],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ROLE},
        },
    ]
