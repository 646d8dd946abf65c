"""Gang: number, shape and names of the pods that run a job."""

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

# Names and labels of a job's objects are deterministic, so that a restarted supervisor finds its job again.

JOB_APP = "hanzo-ml-job"
"""Value of the label `app` on every pod that runs a job; the NetworkPolicy in deploy/kubernetes selects by it."""

DOMAIN = "ml.hanzo.ai"
MAX_NAME_CHARACTERS = 41
"""Limit for the name without its generation. JobSet appends up to 18 characters for a pod (`-node-0-9999-abcde`), the
generation 4 (`-g99`), and a host name has at most 63."""


def object_name(job: JobKey, generation: int = 1) -> str:
    """Return the name of a job's objects, unique per program, job id and generation.

    It is a DNS-1123 label that starts with a letter. Generated ids stay readable; others (capitals, underscores, or long
    names: a run id may have 256 characters) become a short form and a hash. The first generation has no suffix: a job rarely
    has another.
    """
    return base_name(job) if generation == 1 else f"{base_name(job)}-g{generation}"


def base_name(job: JobKey) -> str:
    """Return the name that all generations of a job share."""
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
"""Annotation of a job whose pods are kept for a time after it failed."""


def labels(job: JobKey) -> dict[str, str]:
    """Return the labels of every object of a job, in all generations."""
    return {"app": JOB_APP, PROGRAM_LABEL: job.program.value, JOB_LABEL: base_name(job)}


def annotations(job: Job, generation: int = 1) -> dict[str, str]:
    """Return annotations with the unchanged id, the work digest and the generation."""
    return {
        JOB_ID_ANNOTATION: job.id,
        DIGEST_ANNOTATION: job.work_digest,
        GENERATION_ANNOTATION: str(generation),
        **({KEEP_ANNOTATION: "true"} if job.pod.keep_failed else {}),
    }


DEFAULT_API = "http://ml.hanzo.svc:8057"

WORK = "/work"
"""Scratch volume of a pod: with /tmp the only place that a program can write to."""


@dataclass(frozen=True)
class Gang:
    """Pods that start, restart and end together, and the job document that they read.

    `processes` is torchrun's process count per pod; None runs the program itself. Pods of a program that shares its work
    through the store (`Job.pods`) do not need each other and may restart alone. `generation` grows when the job is recreated
    with another number of nodes; `max_seconds` is then the remaining time. Pods of a gang that `is_isolated` cannot reach
    those of other jobs.
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
        """Whether the pods cooperate only through the store."""
        return self.processes is None and self.nodes > 1

    @property
    def minimum_pods(self) -> int:
        """Number of pods that must start together."""
        return 1 if self.shares else self.nodes


def plan_gang(
    job: Job, scheduler: Scheduler, generation: int = 1, used_seconds: float = 0, namespace: str | None = None
) -> Gang:
    """Plan the gang that runs a job, by default in `scheduler.namespace`.

    Earlier generations used `used_seconds` of its `max_duration`.

    Raises:
        BadConfiguration: the job requests hardware that is not in the settings.
    """
    hardware, distributed = job.hardware, job.distributed
    if hardware.gpu_type is not None and hardware.gpu_type not in scheduler.gpu_types:
        known = ", ".join(scheduler.gpu_types)
        raise BadConfiguration(
            f"unknown gpu_type '{hardware.gpu_type}': use one of {known}, or add it to scheduler.gpu_types"
        )
    # With gloo, gpus_per_node counts processes; the GPUs, if any, are given by `hardware`.
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
    """Return the volume claims of every job, then the job's own.

    Raises:
        BadConfiguration: both mount a volume at the same path.
    """
    paths = {volume.path for volume in common}
    if twice := next((volume for volume in own if volume.path in paths), None):
        raise BadConfiguration(f"pod.volumes: {twice.path} is mounted in every job already: choose another path")
    return (*common, *own)


def choose_rdma_resource(distributed: Distributed, scheduler: Scheduler) -> str | None:
    """Return the RDMA resource of each pod; None for a single node.

    `auto` uses it if the settings name one; without it a pod sees no RDMA device, and NCCL uses TCP.

    Raises:
        BadConfiguration: RDMA is `enabled` and the settings name no resource: NCCL would find no network.
    """
    if distributed.num_nodes == 1 or distributed.rdma == "disabled":
        return None
    if distributed.rdma == "enabled" and scheduler.rdma_resource is None:
        raise BadConfiguration(
            "distributed.rdma is enabled, but scheduler.rdma_resource is not set: set it to the resource name of the "
            "cluster's RDMA device plugin, or set distributed.rdma to auto"
        )
    return scheduler.rdma_resource


def job_image(job: Job) -> str | None:
    """Return the image that a command or recipe requests.

    It must contain Hanzo ML's programs, as `scheduler.default_image` does.
    """
    if job.program is Program.COMMAND:
        return Script.model_validate(job.parameters["script"]).image
    recipe = job.parameters.get("recipe")
    image = recipe.get("image") if isinstance(recipe, dict) else None
    return str(image) if image else None


def api_address(job: Job, scheduler: Scheduler) -> str:
    """Return the API's base address for pods, by default the specification's Service."""
    uri = scheduler.tracking_uri or (job.tracking.uri if job.tracking else DEFAULT_API)
    return uri.rstrip("/")


def in_pod(job: Job, scheduler: Scheduler) -> Job:
    """Return the job with a pod's folders and addresses, and an unchanged `work_digest`.

    Objects are accessed through the API, by signed URLs: a pod has no keys of the object store.
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
