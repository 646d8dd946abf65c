"""Namespaces of jobs, one for each organization: `hanzo-ml tenant apply`, `list` and `delete`.

The namespace of the organization `default` has the same objects, and `hanzo-ml cluster render` prints them.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from recipes.contracts.job import BadConfiguration
from resources.compute.kubernetes.cluster import (
    Cluster,
    ClusterError,
    Item,
    Kind,
    NotFound,
    RequestDenied,
    open_cluster,
)
from resources.compute.kubernetes.gang import DOMAIN
from resources.compute.kubernetes.job_manifest import to_yaml
from resources.compute.kubernetes.namespaces import organization_namespace
from resources.compute.kubernetes.network_policy import namespace_policy
from resources.compute.kubernetes.setup.kinds import CLAIM, NAMESPACE, SECRET, setup_kind
from resources.compute.kubernetes.setup.kubeconfig import find_administrator_kubeconfig
from resources.compute.kubernetes.setup.permissions import RESTRICTED, render_role
from resources.compute.kubernetes.setup.queues import INSTALLATION_LABEL, LABELS, local_queue
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.settings.settings import Settings

ORGANIZATION_ANNOTATION = f"{DOMAIN}/organization"
"""Annotation of a namespace with its organization: a label cannot hold every organization's id."""
NAME = "hanzo-ml"
MIN_REQUESTS = {"cpu": "100m", "memory": "256Mi"}
"""Default requests of a container: without them, Kueue and the scheduler would not count its usage."""


def render_namespace(settings: Settings, organization: str = DEFAULT_ORGANIZATION) -> list[dict[str, Any]]:
    """Return the objects for jobs of an organization, in order of creation, without queue.

    Raises:
        BadConfiguration: no NetworkPolicy can express the configured address of the object store.
    """
    scheduler = settings.scheduler
    name = organization_namespace(scheduler, organization)
    metadata: dict[str, Any] = {
        "name": name,
        "labels": {**LABELS, INSTALLATION_LABEL: scheduler.namespace, **RESTRICTED},
        "annotations": {ORGANIZATION_ANNOTATION: organization},
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
        resource_quota(scheduler.max_objects, scheduler.max_storage, name),
        limit_range(scheduler.max_storage, name),
        *render_role(scheduler, name, settings.dagster.run_pods.namespace),
        namespace_policy(settings, name),
    ]


def render_tenant(settings: Settings, organization: str) -> list[dict[str, Any]]:
    """Return all objects of an organization that is not the default one.

    Raises:
        BadConfiguration: organizations have no namespaces of their own, or as in `render_namespace`.
    """
    scheduler = settings.scheduler
    if not scheduler.namespace_per_organization:
        raise BadConfiguration(
            "scheduler.namespace_per_organization is false, so that all organizations share the namespace "
            f"{scheduler.namespace}: set it to true, then run `hanzo-ml cluster render | kubectl apply -f -` again"
        )
    if organization == DEFAULT_ORGANIZATION or not organization.strip():
        raise BadConfiguration(
            f"jobs of the organization {DEFAULT_ORGANIZATION!r} run in {scheduler.namespace}: "
            "run `hanzo-ml cluster render | kubectl apply -f -`"
        )
    objects = render_namespace(settings, organization)
    if scheduler.gang_backend == "kueue":
        objects.append(local_queue(scheduler, organization_namespace(scheduler, organization)))
    return objects


def resource_quota(max_objects: int, max_storage: str, namespace: str) -> dict[str, Any]:
    """Return the quota for storage and for objects created by the control plane.

    GPUs are left to Kueue: this quota counts terminating pods, and would reject those of a job that preempts them. Objects
    created by JobSet are not limited either: a restarting gang briefly has two Jobs.
    """
    hard = {
        "count/configmaps": str(max_objects + 1),  # each namespace has one with the cluster's certificates
        "count/jobsets.jobset.x-k8s.io": str(max_objects),
        "services.nodeports": "0",
        "services.loadbalancers": "0",
        "requests.storage": max_storage,
    }
    metadata = {"name": NAME, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}


def limit_range(max_storage: str, namespace: str) -> dict[str, Any]:
    limits = [
        {"type": "Container", "defaultRequest": MIN_REQUESTS},
        {"type": "PersistentVolumeClaim", "max": {"storage": max_storage}},
    ]
    metadata = {"name": NAME, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "LimitRange", "metadata": metadata, "spec": {"limits": limits}}


def find_missing(cluster: Cluster, settings: Settings, organization: str) -> list[str]:
    """List missing objects of an organization's namespace as kind and name.

    This includes Secrets and claims of every job, but not objects that this identity may not read.

    Raises:
        ClusterError: the API server does not answer.
    """
    is_default = organization == DEFAULT_ORGANIZATION
    objects = render_namespace(settings) if is_default else render_tenant(settings, organization)
    namespace, scheduler = objects[0]["metadata"]["name"], settings.scheduler
    secrets = dict.fromkeys(filter(None, (scheduler.job_secret, *scheduler.image_pull_secrets)))
    wanted = [(setup_kind(item), item["metadata"]["name"]) for item in objects]
    if not is_default:  # for the default one `check` lists them with the commands that create them
        wanted += [(SECRET, name) for name in secrets]
        wanted += [(CLAIM, volume.claim) for volume in scheduler.volumes]
    return [f"{kind.name} {name}" for kind, name in wanted if not may_exist(cluster, kind, namespace, name)]


def may_exist(cluster: Cluster, kind: Kind, namespace: str, name: str) -> bool:
    """Return False if an object is known to be missing."""
    with suppress(RequestDenied):
        try:
            cluster.read(kind, namespace, name)
        except NotFound:
            return False
    return True


def apply_tenant(cluster: Cluster, settings: Settings, organization: str) -> list[Item]:
    """Create or update the objects of an organization and return them.

    Raises:
        BadConfiguration: a namespace of that name belongs to another organization.
        ClusterError: the API server rejects them, or does not answer.
    """
    objects = render_tenant(settings, organization)
    refuse_foreign_namespace(cluster, objects[0])
    return [cluster.apply(setup_kind(item), item) for item in objects]


def refuse_foreign_namespace(cluster: Cluster, wanted: Item) -> None:
    """Check that an existing namespace belongs to this organization.

    Raises:
        BadConfiguration: it belongs to another one.
    """
    name = wanted["metadata"]["name"]
    try:
        found = cluster.read(NAMESPACE, None, name)
    except NotFound:
        return
    if read_organization(found) != wanted["metadata"]["annotations"][ORGANIZATION_ANNOTATION]:
        raise BadConfiguration(
            f"namespace {name} exists and is not this organization's: to assign it, first run "
            f"`kubectl annotate namespace {name} {ORGANIZATION_ANNOTATION}=ORGANIZATION`"
        )


def list_tenants(cluster: Cluster, settings: Settings) -> dict[str, str]:
    """Return the namespace by organization, without the default one."""
    selector = f"{INSTALLATION_LABEL}={settings.scheduler.namespace}"
    found = {
        read_organization(item): item["metadata"]["name"] for item in cluster.list(NAMESPACE, labelSelector=selector)[0]
    }
    return {
        organization: name for organization, name in sorted(found.items()) if organization not in ("", DEFAULT_ORGANIZATION)
    }


def read_organization(namespace: Item) -> str:
    return str((namespace["metadata"].get("annotations") or {}).get(ORGANIZATION_ANNOTATION, ""))


def delete_tenant(cluster: Cluster, settings: Settings, organization: str) -> str:
    """Delete the namespace of an organization with its contents; return its name.

    Raises:
        BadConfiguration: the organization has none.
        ClusterError: the API server rejects it, or does not answer.
    """
    name = list_tenants(cluster, settings).get(organization)
    if name is None:
        raise BadConfiguration(f"organization {organization} has no namespace: see `hanzo-ml tenant list`")
    cluster.delete(NAMESPACE, None, name)
    return name


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("apply", "list", "delete"))
    parser.add_argument("organization", nargs="?", default="")
    parser.add_argument("--kubeconfig")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    try:
        settings = Settings.load()
        if options.dry_run:
            print(to_yaml(render_tenant(settings, options.organization)), end="")
            return
        cluster = open_cluster(find_administrator_kubeconfig(options.kubeconfig, settings.scheduler))
        for line in carry_out(cluster, settings, options.action, options.organization):
            print(line)
    except (BadConfiguration, ClusterError) as problem:
        sys.exit(f"error: {problem}")


def carry_out(cluster: Cluster, settings: Settings, action: str, organization: str) -> list[str]:
    """Run an action and return what to print.

    Raises:
        BadConfiguration, ClusterError
    """
    match action:
        case "apply":
            return [f"{item['kind']} {item['metadata']['name']}" for item in apply_tenant(cluster, settings, organization)]
        case "delete":
            return [f"deleted namespace {delete_tenant(cluster, settings, organization)}"]
    return [f"{organization} {namespace}" for organization, namespace in list_tenants(cluster, settings).items()]


if __name__ == "__main__":
    main()
