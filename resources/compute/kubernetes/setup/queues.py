"""Queues, quotas and priorities of a cluster, rendered from the settings.

Kueue: one ClusterQueue with the quota `scheduler.capacity`, one LocalQueue in the jobs' namespace, one ResourceFlavor per
GPU type, and one WorkloadPriorityClass per priority. Volcano: a queue with the same limits. An administrator applies them at
installation.
"""

from typing import Any

from recipes.contracts.job import BadConfiguration
from recipes.contracts.quantities import parse_bytes
from resources.compute.kubernetes.gang import DOMAIN
from resources.settings.scheduler import CPU_FLAVOR, Capacity, Scheduler

KUEUE_API = "kueue.x-k8s.io/v1beta2"
GPU = "nvidia.com/gpu"
PRIORITIES = {"low": 100, "medium": 1000, "high": 10_000}
"""Value by priority of a job, with gaps for classes in between."""
PREEMPTION = {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Never"}
"""A job is preempted only by one of strictly higher priority: if equal jobs, or two queues, may preempt each other, they can
do so back and forth without progress (kueue #3779).
"""
LABELS = {"app.kubernetes.io/part-of": "hanzo-ml"}
INSTALLATION_LABEL = f"{DOMAIN}/installation"
"""Label of each namespace of jobs, with the value `scheduler.namespace`: the queue admits only jobs of these namespaces."""


def render_queues(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Return the objects in the order in which to apply them.

    Empty for a gang backend without queues.

    Raises:
        BadConfiguration: the capacity for jobs is not configured.
    """
    match scheduler.gang_backend:
        case "kueue":
            return render_kueue(scheduler)
        case "volcano":
            return [volcano_queue(scheduler), *priority_classes(scheduler)]
        case "coscheduling":
            return priority_classes(scheduler)
    return []


def render_kueue(scheduler: Scheduler) -> list[dict[str, Any]]:
    capacity = require_capacity(scheduler)
    flavors = [resource_flavor(name, scheduler) for name in capacity]
    queues = [cluster_queue(capacity, scheduler), local_queue(scheduler, scheduler.namespace)]
    return [*flavors, *queues, *workload_priorities(scheduler)]


def require_capacity(scheduler: Scheduler) -> dict[str, Capacity]:
    if not scheduler.capacity:
        raise BadConfiguration(
            "scheduler.capacity is empty: set how much jobs may use of each node type, such as "
            f"{scheduler.gpu_types[0] if scheduler.gpu_types else CPU_FLAVOR}: {{gpus: 8, cpu: 64, memory: 512Gi}}"
        )
    return scheduler.capacity


def resource_flavor(name: str, scheduler: Scheduler) -> dict[str, Any]:
    """Return the flavor of nodes with one GPU type.

    The taint excludes jobs without GPUs, even if the nodes do not really have it.
    """
    spec: dict[str, Any] = {}
    if name != CPU_FLAVOR:
        spec["nodeLabels"] = {scheduler.gpu_type_label: name}
        spec["nodeTaints"] = [{"key": GPU, "value": "present", "effect": "NoSchedule"}]
    return cluster_object(KUEUE_API, "ResourceFlavor", name) | {"spec": spec}


def cluster_queue(capacity: dict[str, Capacity], scheduler: Scheduler) -> dict[str, Any]:
    quotas = {name: quota(each, scheduler.rdma_resource) for name, each in capacity.items()}
    spec = {
        "namespaceSelector": {"matchLabels": {INSTALLATION_LABEL: scheduler.namespace}},
        "queueingStrategy": "BestEffortFIFO",
        "preemption": PREEMPTION,
        "flavorFungibility": {"whenCanPreempt": "TryNextFlavor"},
        "resourceGroups": [
            {
                "coveredResources": list(next(iter(quotas.values()))),
                "flavors": [
                    {
                        "name": name,
                        "resources": [{"name": key, "nominalQuota": amount} for key, amount in quotas[name].items()],
                    }
                    for name in quotas
                ],
            }
        ],
    }
    return cluster_object(KUEUE_API, "ClusterQueue", scheduler.cluster_queue) | {"spec": spec}


def quota(capacity: Capacity, rdma_resource: str | None) -> dict[str, str]:
    """Return the quota by resource.

    A pod has one network device and at least one GPU, so as many network devices as GPUs suffice.
    """
    amounts = {"cpu": str(capacity.cpu), "memory": capacity.memory, GPU: str(capacity.gpus)}
    return amounts | ({rdma_resource: str(capacity.gpus)} if rdma_resource else {})


def local_queue(scheduler: Scheduler, namespace: str) -> dict[str, Any]:
    item = cluster_object(KUEUE_API, "LocalQueue", scheduler.queue)
    item["metadata"]["namespace"] = namespace
    return item | {"spec": {"clusterQueue": scheduler.cluster_queue}}


def workload_priorities(scheduler: Scheduler) -> list[dict[str, Any]]:
    return [
        cluster_object(KUEUE_API, "WorkloadPriorityClass", getattr(scheduler.priority_classes, priority))
        | {"value": value, "description": f"Jobs of Hanzo ML with priority {priority}"}
        for priority, value in PRIORITIES.items()
    ]


def priority_classes(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Return Kubernetes' priority classes, for schedulers that preempt pods."""
    return [
        cluster_object("scheduling.k8s.io/v1", "PriorityClass", getattr(scheduler.priority_classes, priority))
        | {"value": value, "description": f"Jobs of Hanzo ML with priority {priority}"}
        for priority, value in PRIORITIES.items()
    ]


def volcano_queue(scheduler: Scheduler) -> dict[str, Any]:
    capacity = require_capacity(scheduler).values()
    memory = sum(parse_bytes(each.memory) for each in capacity)
    limits = {
        "cpu": str(sum(each.cpu for each in capacity)),
        "memory": str(int(memory)),
        GPU: str(sum(each.gpus for each in capacity)),
    }
    spec = {"weight": 1, "reclaimable": True, "capability": limits}
    return cluster_object("scheduling.volcano.sh/v1beta1", "Queue", scheduler.queue) | {"spec": spec}


def cluster_object(api_version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "labels": dict(LABELS)}}
