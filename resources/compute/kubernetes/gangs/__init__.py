"""Gang backends: what makes a cluster start all pods of a job together, or none of them.

`scheduler.gang_backend` names one. Each is a function that renders the objects which run a gang, in the order of creation;
ConfigMap and Secret are there already. How far a gang is, every backend's pods and JobSet or Job say in the same words.
"""

from collections.abc import Callable
from typing import Any

from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.gangs import coscheduling, indexed_job, kueue, volcano

GANG_BACKENDS: dict[str, Callable[[Gang], list[dict[str, Any]]]] = {
    "kueue": kueue.manifests,
    "indexed_job": indexed_job.manifests,
    "coscheduling": coscheduling.manifests,
    "volcano": volcano.manifests,
}
