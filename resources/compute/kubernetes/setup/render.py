"""All that a cluster needs for jobs, as YAML: `hanzo-ml cluster render`.

Namespaces, accounts and roles of the control plane, what the jobs of the default organization need, and the queues. Apply
it when you install the cluster, and again after an upgrade. Other organizations: `hanzo-ml tenant apply`.
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
    """Raises BadConfiguration: the settings do not say how much jobs may use, or where the object store is."""
    scheduler, run_pods = settings.scheduler, settings.dagster.run_pods
    account = render_account(scheduler, run_pods.namespace)
    namespace = render_namespace(settings)
    if scheduler.namespace == run_pods.namespace:
        account = account[1:]  # it is one namespace, with the labels of one of jobs
    return [*account, *namespace, *launcher_objects(run_pods), *render_queues(scheduler)]


def main() -> None:
    try:
        objects = render_cluster(Settings.load())
    except BadConfiguration as problem:
        sys.exit(f"error: {problem}")
    print(to_yaml(objects), end="")


if __name__ == "__main__":
    main()
