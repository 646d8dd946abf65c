"""Render all objects that a cluster needs for jobs as YAML: `hanzo-ml cluster render`.

Namespaces, accounts and roles of the control plane, the objects of the default organization, and the queues. Apply them when
you install the cluster, and again after an upgrade. For other organizations use `hanzo-ml tenant apply`.
"""

import sys
from typing import Any

from recipes.contracts.job import BadConfiguration
from resources.compute.kubernetes.job_manifest import to_yaml
from resources.compute.kubernetes.setup.permissions import render_account
from resources.compute.kubernetes.setup.queues import render_queues
from resources.compute.kubernetes.setup.tenants import render_namespace
from resources.orchestration.launcher_role import launcher_objects
from resources.settings.settings import Settings


def render_cluster(settings: Settings) -> list[dict[str, Any]]:
    """Return all objects in the order in which to apply them.

    Raises:
        BadConfiguration: the capacity for jobs or the address of the object store is not configured.
    """
    scheduler, run_pods = settings.scheduler, settings.dagster.run_pods
    account = render_account(scheduler, run_pods.namespace)
    namespace = render_namespace(settings)
    if scheduler.namespace == run_pods.namespace:
        account = account[1:]  # one namespace for both, with the labels for jobs
    return [*account, *namespace, *launcher_objects(run_pods), *render_queues(scheduler)]


def main() -> None:
    try:
        objects = render_cluster(Settings.load())
    except BadConfiguration as problem:
        sys.exit(f"error: {problem}")
    print(to_yaml(objects), end="")


if __name__ == "__main__":
    main()
