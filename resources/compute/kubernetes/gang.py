"""Gang: how many pods of what shape run a job, and their names."""

import hashlib
import math
import re
from dataclasses import dataclass
from urllib.parse import quote

from recipes.contracts.command_job import Script
from recipes.contracts.job import BadConfiguration, Distributed, Job, Program, StoreAddress
from recipes.contracts.pod_settings import Toleration, VolumeClaim
from recipes.contracts.quantities import parse_duration
from resources.compute.base import JobKey
from resources.settings.scheduler import Scheduler

# Names and labels of a job's objects: the same at every look, so that a supervisor that comes back finds its job again.

JOB_APP = "hanzo-ml-job"
"""Value of the label `app` on every pod that runs a job; the NetworkPolicy in deploy/kubernetes selects by it."""

DOMAIN = "ml.hanzo.ai"
MAX_NAME_CHARACTERS = 41
"""Of the name without its generation. JobSet appends up to 18 characters for a pod (`-node-0-9999-abcde`), the generation 4
(`-g99`), and a host name has at most 63."""


def object_name(job: JobKey, generation: int = 1) -> str:
    """Name of a job's objects: a DNS-1123 label that starts with a letter, unique per program, job id and generation.

    Ids that the product makes stay readable; anything else (capitals, underscores, long names: a run id may be up to 256
    characters, row F9) becomes a short form and a hash. The first generation has no suffix: a job rarely has another.
    """
    return base_name(job) if generation == 1 else f"{base_name(job)}-g{generation}"


def base_name(job: JobKey) -> str:
    """The name that all generations of a job share."""
    program = job.program.replace("_", "-")
    if re.fullmatch(r"[0-9a-f]{32}", job.id) and len(whole := f"{program}-{job.id}") <= MAX_NAME_CHARACTERS:
        return whole
    readable = re.sub(r"[^a-z0-9]+", "-", job.id.lower().removeprefix(program)).strip("-")
    short = f"{program}-{readable}"[:30].rstrip("-")
    return f"{short}-{hashlib.sha256(f'{job.program}/{job.id}'.encode()).hexdigest()[:10]}"


PROGRAM_LABEL, JOB_LABEL = f"{DOMAIN}/program", f"{DOMAIN}/job"
JOB_ID_ANNOTATION, DIGEST_ANNOTATION = f"{DOMAIN}/job-id", f"{DOMAIN}/work-digest"
GENERATION_ANNOTATION = f"{DOMAIN}/generation"
KEEP_ANNOTATION = f"{DOMAIN}/keep-failed"
"""On objects of a job whose pods stay for a time after it has failed."""


def labels(job: JobKey) -> dict[str, str]:
    """Labels of every object of a job, in all its generations."""
    return {"app": JOB_APP, PROGRAM_LABEL: job.program.value, JOB_LABEL: base_name(job)}


def annotations(job: Job, generation: int = 1) -> dict[str, str]:
    """The unchanged id, and what identifies equal work under the same name: digest and generation."""
    return {
        JOB_ID_ANNOTATION: job.id,
        DIGEST_ANNOTATION: job.work_digest,
        GENERATION_ANNOTATION: str(generation),
        **({KEEP_ANNOTATION: "true"} if job.pod.keep_failed else {}),
    }


DEFAULT_API = "http://ml.hanzo.svc:8057"

# What a job is on a cluster: how many pods of what shape, and the job document as those pods read it.

WORK = "/work"
"""The scratch volume of a pod: the only place, besides /tmp, that a program can write to."""


@dataclass(frozen=True)
class Gang:
    """Pods that start, restart and end together. `processes` is torchrun's number per pod; none: the program itself.

    Pods of a program that shares its work through the store (`Job.pods`) need no other to run, and may restart alone.
    `generation` grows when the job is created again with another number of nodes; `max_seconds` is what is left then.
    The pods of one that `is_isolated` reach no other job's.
    """

    name: str
    generation: int
    api: str
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
    coscheduler: str
    priority_class: str
    namespace: str
    is_isolated: bool
    secret: str | None
    image_pull_secrets: tuple[str, ...]
    tolerations: tuple[Toleration, ...]
    volumes: tuple[VolumeClaim, ...]
    scratch_limit: str | None

    @property
    def shares(self) -> bool:
        """Whether its pods need only the store to find each other."""
        return self.processes is None and self.nodes > 1

    @property
    def minimum_pods(self) -> int:
        """How many of its pods must start together."""
        return 1 if self.shares else self.nodes


def plan_gang(
    job: Job, scheduler: Scheduler, generation: int = 1, used_seconds: float = 0, namespace: str | None = None
) -> Gang:
    """The gang that runs a job, in `scheduler.namespace` unless another one is given.

    `used_seconds` of its `max_duration` went to earlier generations.

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
    gpu_label = {scheduler.gpu_type_label: hardware.gpu_type} if hardware.gpu_type and gpus else {}
    spot = scheduler.spot_tolerations if job.schedule.preemptible else ()
    return Gang(
        name=object_name(job, generation),
        generation=generation,
        api=api_address(job, scheduler),
        job=in_pod(job, scheduler),
        image=job_image(job) or scheduler.default_image,
        nodes=distributed.num_nodes if distributed else job.pods,
        processes=distributed.gpus_per_node if distributed else None,
        gpus=gpus,
        rdma=choose_rdma_resource(distributed, scheduler) if distributed and on_gpus else None,
        node_labels=job.pod.node_selector | gpu_label,
        cpu=hardware.cpu,
        memory=hardware.memory,
        max_seconds=max(1, math.ceil(parse_duration(job.schedule.max_duration) - used_seconds)),
        queue=scheduler.queue,
        coscheduler=scheduler.coscheduler,
        priority_class=getattr(scheduler.priority_classes, job.schedule.priority),
        namespace=namespace or scheduler.namespace,
        is_isolated=scheduler.namespace_per_organization,
        secret=scheduler.job_secret,
        image_pull_secrets=tuple(dict.fromkeys((*scheduler.image_pull_secrets, *job.pod.image_pull_secrets))),
        tolerations=(*spot, *job.pod.tolerations),
        volumes=merge_volumes(scheduler.volumes, job.pod.volumes),
        scratch_limit=scheduler.scratch_limit,
    )


def merge_volumes(common: tuple[VolumeClaim, ...], own: tuple[VolumeClaim, ...]) -> tuple[VolumeClaim, ...]:
    """The claims of every job, then the job's own.

    Raises:
        BadConfiguration: both mount one at the same path.
    """
    paths = {volume.path for volume in common}
    if twice := next((volume for volume in own if volume.path in paths), None):
        raise BadConfiguration(f"pod.volumes: {twice.path} is mounted in every job already: choose another path")
    return (*common, *own)


def choose_rdma_resource(distributed: Distributed, scheduler: Scheduler) -> str | None:
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


def job_image(job: Job) -> str | None:
    """The image that a command, or a recipe, asks for. It must hold Hanzo ML's programs, as `scheduler.default_image` does
    (rows G4, G8).
    """
    if job.program is Program.COMMAND:
        return Script.model_validate(job.parameters["script"]).image
    recipe = job.parameters.get("recipe")
    image = recipe.get("image") if isinstance(recipe, dict) else None
    return str(image) if image else None


def api_address(job: Job, scheduler: Scheduler) -> str:
    """Base address of the API for the job's pods: the specification's Service, unless the settings name another."""
    uri = scheduler.tracking_uri or (job.tracking.uri if job.tracking else DEFAULT_API)
    return uri.rstrip("/")


def in_pod(job: Job, scheduler: Scheduler) -> Job:
    """The same work with a pod's folders and addresses; its `work_digest` does not change.

    Objects are reached through the API, by signed addresses: a pod holds no keys of the object store.
    """
    api = api_address(job, scheduler)
    objects = f"api+{api}/v1/jobs/{quote(job.id, safe='')}/programs/{job.program}/objects"
    changed = {
        "work_dir": f"{WORK}/job",
        "cache_dir": f"{WORK}/cache",
        "tracking": job.tracking and job.tracking.model_copy(update={"uri": api}),
        "store": StoreAddress(root=objects, buckets=job.store.buckets),
    }
    return job.model_copy(update=changed)
