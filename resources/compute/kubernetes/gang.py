"""What a job is on a cluster: how many pods of what shape, and the job document as those pods read it."""

import math
from dataclasses import dataclass

from recipes.contracts.command_job import Script
from recipes.contracts.job import BadConfiguration, Distributed, Job, Program
from recipes.contracts.quantities import parse_duration
from resources.compute.kubernetes.names import object_name
from resources.settings.sections import Scheduler

WORK = "/work"
"""The scratch volume of a pod: the only place, besides /tmp, that a program can write to."""


@dataclass(frozen=True)
class Gang:
    """Pods that start, restart and end together. `processes` is torchrun's number per pod; none: the program itself.

    Pods of a program that shares its work through the store (`Job.pods`) need no other to run, and may restart alone.
    """

    name: str
    job: Job
    image: str
    nodes: int
    processes: int | None
    gpus: int
    rdma: str | None
    node_labels: dict[str, str]
    cpu: int | None
    memory: str | None
    max_seconds: int
    queue: str
    priority_class: str
    namespace: str
    secret: str

    @property
    def shares(self) -> bool:
        """Whether its pods need only the store to find each other."""
        return self.processes is None and self.nodes > 1


def gang_of(job: Job, scheduler: Scheduler) -> Gang:
    """The gang that runs a job.

    Raises:
        BadConfiguration: the job asks for hardware that the settings do not know.
    """
    hardware, distributed = job.hardware, job.distributed
    if hardware.gpu_type is not None and hardware.gpu_type not in scheduler.gpu_types:
        known = ", ".join(scheduler.gpu_types)
        raise BadConfiguration(
            f"unknown gpu_type '{hardware.gpu_type}': use one of {known}, or add it to scheduler.gpu_types"
        )
    # Over gloo, gpus_per_node counts processes; the GPUs, if any, are what `hardware` says.
    on_gpus = distributed is not None and distributed.backend == "nccl"
    gpus = distributed.gpus_per_node if distributed and on_gpus else hardware.gpus
    node_labels = {scheduler.gpu_type_label: hardware.gpu_type} if hardware.gpu_type and gpus else {}
    return Gang(
        name=object_name(job),
        job=in_pod(job, scheduler),
        image=image_of(job) or scheduler.default_image,
        nodes=distributed.num_nodes if distributed else job.pods,
        processes=distributed.gpus_per_node if distributed else None,
        gpus=gpus,
        rdma=rdma_of(distributed, scheduler) if distributed and on_gpus else None,
        node_labels=node_labels,
        cpu=hardware.cpu,
        memory=hardware.memory,
        max_seconds=math.ceil(parse_duration(job.schedule.max_duration)),
        queue=scheduler.queue,
        priority_class=getattr(scheduler.priority_classes, job.schedule.priority),
        namespace=scheduler.namespace,
        secret=scheduler.job_secret,
    )


def rdma_of(distributed: Distributed, scheduler: Scheduler) -> str | None:
    """The resource that gives each pod of a gang its network card. A single node talks to nobody.

    `auto` takes it where the cluster has it; without it a pod sees no such device, and NCCL goes over TCP.

    Raises:
        BadConfiguration: it is `enabled`, and the settings know none: NCCL would find no network at all.
    """
    if distributed.num_nodes == 1 or distributed.rdma == "disabled":
        return None
    if distributed.rdma == "enabled" and scheduler.rdma_resource is None:
        raise BadConfiguration(
            "distributed.rdma is enabled, and no resource is known that gives a pod such a device: set "
            "scheduler.rdma_resource to the name that the cluster's plugin has for it, or distributed.rdma to auto"
        )
    return scheduler.rdma_resource


def image_of(job: Job) -> str | None:
    """The image that a command, or a recipe, asks for. It must hold Hanzo ML's programs, as `scheduler.default_image` does
    (rows G4, G8).
    """
    if job.program is Program.COMMAND:
        return Script.model_validate(job.parameters["script"]).image
    recipe = job.parameters.get("recipe")
    image = recipe.get("image") if isinstance(recipe, dict) else None
    return str(image) if image else None


def in_pod(job: Job, scheduler: Scheduler) -> Job:
    """The same work with a pod's folders and the API's address inside the cluster; its `work_digest` does not change."""
    tracking = job.tracking
    if tracking is not None and scheduler.tracking_uri is not None:
        tracking = tracking.model_copy(update={"uri": scheduler.tracking_uri})
    return job.model_copy(update={"work_dir": f"{WORK}/job", "cache_dir": f"{WORK}/cache", "tracking": tracking})
