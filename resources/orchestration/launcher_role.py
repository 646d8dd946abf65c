"""Service accounts and permissions for run pods, which only Dagster's processes may create."""

from typing import Any

from resources.settings.sections import RunPods

DAGSTER_ACCOUNT = "hanzo-ml-dagster"
"""Service account of Dagster's daemon, code server and web server, each of which may start or end runs."""
ROLE = "hanzo-ml-run-launcher"
RULES = (
    ("batch", ("jobs",), ("create", "get", "list", "delete")),
    ("", ("pods",), ("get", "list", "delete")),
    ("", ("pods/log", "events"), ("get", "list")),  # shown by Dagster for a failed worker
)


def launcher_objects(pods: RunPods) -> list[dict[str, Any]]:
    """Return service accounts, Role and RoleBinding in the control plane's namespace."""

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
