"""Gang backends: start all pods of a job together, or none of them.

`scheduler.gang_backend` selects one. Each is a function that renders the objects of a gang in the order of creation;
ConfigMap and Secret exist already. Progress is read from pods and JobSet or Job in the same way for every backend.
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
