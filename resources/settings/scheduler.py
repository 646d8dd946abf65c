"""The section `scheduler` of `config.yaml`: backend, limits and pods of jobs."""

from ipaddress import ip_network
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from recipes.contracts.job import Priority
from recipes.contracts.pod_settings import ObjectName, Toleration, VolumeClaim
from recipes.contracts.quantities import Duration, validate_quantity
from resources.compute.backends import check_backend
from resources.settings.sections import Section


class PriorityClasses(Section):
    """Kueue's WorkloadPriorityClass for each priority of a job."""

    low: str = Field("interactive", description="WorkloadPriorityClass of priority low")
    medium: str = Field("batch", description="WorkloadPriorityClass of priority medium")
    high: str = Field("production", description="WorkloadPriorityClass of priority high")


class Quota(Section):
    """Limits of the jobs of an organization."""

    max_gpus: int | None = Field(
        None,
        ge=0,
        description="GPUs that its running jobs use together; on a cluster, GPUs of each of its jobs, not their sum; "
        "no limit when unset",
    )
    max_concurrent_jobs: int | None = Field(None, ge=1, description="jobs that it runs at a time; no limit when unset")
    priority: Priority | None = Field(None, description="highest priority of its jobs, and the one of jobs that set none")
    preemptible: bool = Field(False, description="treat all its jobs as preemptible")


class Capacity(Section):
    """Kueue's nominal quota on the nodes with one type of GPU, or on those without."""

    gpus: int = Field(0, ge=0, description="GPUs that jobs may use at a time")
    cpu: int = Field(ge=0, description="CPU cores that jobs may use at a time")
    memory: Annotated[str, AfterValidator(validate_quantity)] = Field(
        description="memory that jobs may use at a time, such as 512Gi"
    )


class Egress(Section):
    """One more destination that job pods may connect to."""

    cidr: str | None = Field(None, description="addresses, such as 10.0.0.0/8")
    namespace: str | None = Field(None, description="namespace of the pods to reach, instead of addresses")
    pods: dict[str, str] = Field({}, description="labels of the pods in the namespace; all of them when empty")
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field((), description="TCP and UDP ports; all when empty")

    @field_validator("cidr")
    @classmethod
    def check_cidr(cls, value: str | None) -> str | None:
        if value is not None:
            ip_network(value)
        return value

    @model_validator(mode="after")
    def require_one_target(self) -> Self:
        if (self.cidr is None) == (self.namespace is None):
            raise ValueError("egress: give either cidr or namespace")
        if self.cidr is not None and self.pods:
            raise ValueError("egress: pods are chosen within a namespace: set namespace in place of cidr")
        return self


MAX_NAMESPACE_CHARACTERS = 40
"""Limit for `namespace`: with an organization and a hash appended it must still be a DNS label of 63 characters."""

CPU_FLAVOR = "cpu"
"""Key of `scheduler.capacity` for nodes without GPUs."""


class Scheduler(Section):
    """What runs jobs, how many at a time, and their pods."""

    backend: str = Field(
        "local", description="compute backend: `local`, `kubernetes`, or another folder of resources/compute"
    )
    kubeconfig: str | None = Field(
        None, description="kubeconfig of the cluster; the service account of this process's pod when unset"
    )
    namespace: str = Field("hanzo-ml", description="namespace of job pods")
    namespace_per_organization: bool = Field(
        False,
        description="run jobs of each organization but `default` in a namespace of its own, {namespace}-{organization}, "
        "that `hanzo-ml tenant apply` makes; people who sign in may then submit commands and images of their own",
    )
    max_objects: int = Field(
        1000, ge=1, description="jobs whose objects a namespace holds at a time; further ones wait in the database"
    )
    max_storage: Annotated[str, AfterValidator(validate_quantity)] = Field(
        "10Ti", description="storage that the claims of a namespace may request together"
    )
    egress: tuple[Egress, ...] = Field(
        (),
        description="what job pods may connect to, in addition to the API, storage.endpoint, DNS and their own gang: "
        "{cidr, ports} or {namespace, pods, ports}",
    )
    default_image: str = Field(
        "hanzoai/ml-pytorch:2.3-cuda12.4",
        description="image of job pods whose recipe or job names none. No image with the tag of the default is built: the "
        "manifests of `deploy/kubernetes` set the one that is",
    )
    gpu_types: tuple[str, ...] = Field(
        ("nvidia-a100-80gb", "nvidia-a100-40gb", "nvidia-h100-80gb"),
        description="GPU types that jobs may ask for on a cluster",
    )
    max_concurrent_jobs: int = Field(32, ge=1, description="jobs that run at a time on a cluster, checked at submission")
    jobs_at_once: int | None = Field(
        None,
        ge=1,
        description="jobs that train or evaluate at a time on one machine; the number of its GPUs, or one, when unset",
    )
    devices: tuple[str, ...] | None = Field(
        None, description="GPUs of this machine for jobs; those of CUDA_VISIBLE_DEVICES, else all, when unset"
    )
    quotas: dict[str, Quota] = Field({}, description="limits of organizations, by name; none for others")
    checkpoint_bucket: str = Field(
        "hanzo-ml-checkpoints", description="bucket of checkpoints; another name for storage.buckets.checkpoints"
    )
    gang_backend: Literal["kueue", "indexed_job", "coscheduling", "volcano"] = Field(
        "kueue",
        description="what starts all pods of a job together: a JobSet behind Kueue, a plain Indexed Job, or one with the "
        "PodGroup of the Coscheduling plugin or of Volcano",
    )
    queue: str = Field("hanzo-ml", description="Kueue's LocalQueue in the namespace, or Volcano's queue")
    cluster_queue: str = Field("hanzo-ml", description="Kueue's ClusterQueue, which holds the quota of `capacity`")
    capacity: dict[str, Capacity] = Field(
        {},
        description="quota by GPU type, and by `cpu` for nodes without GPUs, for `hanzo-ml cluster render`",
    )
    coscheduler: str = Field(
        "scheduler-plugins-scheduler",
        description="scheduler that runs the Coscheduling plugin, for gang_backend coscheduling",
    )
    priority_classes: PriorityClasses = PriorityClasses()
    gpu_type_label: str = Field("ml.hanzo.ai/gpu-type", description="label of nodes whose value is one of gpu_types")
    rdma_resource: str | None = Field(
        None,
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?$",
        description="resource name of InfiniBand or RoCE devices, such as rdma/hca: each pod of a job on several nodes gets "
        "one unless distributed.rdma is disabled; none when unset",
    )
    job_secret: ObjectName | None = Field(
        None, description="Secret whose keys every job pod gets as environment variables, such as HF_TOKEN"
    )
    start_limit: Duration = Field(
        "10m", description="how long an admitted job may wait for its image or configuration while it holds its GPUs"
    )
    scratch_limit: str | None = Field(
        None,
        description="size limit of a pod's scratch volume, such as 500Gi, beyond which the kubelet evicts it; without a "
        "limit a pod may fill the disk of its node, and others are evicted too",
    )
    keep_failed_for: Duration = Field("24h", description="how long the pods of a failed job with pod.keep_failed are kept")
    tracking_uri: str | None = Field(
        None, description="address of the API as pods reach it; server.host and port when unset"
    )
    image_pull_secrets: tuple[ObjectName, ...] = Field((), description="Secrets to pull images with, for every job pod")
    volumes: tuple[VolumeClaim, ...] = Field(
        (), description="volume claims that every job pod mounts, in addition to those of its job"
    )
    spot_tolerations: tuple[Toleration, ...] = Field(
        (), description="tolerations of preemptible jobs, for the taints of spot nodes"
    )
    user_secrets: tuple[ObjectName, ...] = Field(
        (), description="with sign-in: Secrets that jobs may use in pod.secrets and pod.image_pull_secrets"
    )
    user_claims: tuple[ObjectName, ...] = Field((), description="with sign-in: volume claims that jobs may mount")
    user_writable_claims: tuple[ObjectName, ...] = Field(
        (), description="with sign-in: volume claims that jobs may write to"
    )
    user_node_labels: tuple[str, ...] = Field((), description="with sign-in: labels that pod.node_selector may use")
    user_tolerations: tuple[str, ...] = Field((), description="with sign-in: taints that pod.tolerations may use")
    user_commands: bool = Field(
        False,
        description="with sign-in: whether jobs may be commands although all organizations share a namespace and its "
        "network; always allowed with namespace_per_organization",
    )

    @model_validator(mode="after")
    def check_capacity(self) -> Self:
        for name, capacity in self.capacity.items():
            if name != CPU_FLAVOR and name not in self.gpu_types:
                known = ", ".join((*self.gpu_types, CPU_FLAVOR))
                raise ValueError(f"capacity: '{name}' is not one of gpu_types: use one of {known}")
            if name == CPU_FLAVOR and capacity.gpus:
                raise ValueError(f"capacity.{CPU_FLAVOR} is of nodes without GPUs: remove its `gpus`")
        return self

    @model_validator(mode="after")
    def check_namespace(self) -> Self:
        if self.namespace_per_organization and len(self.namespace) > MAX_NAMESPACE_CHARACTERS:
            raise ValueError(
                f"namespace has {len(self.namespace)} characters: with namespace_per_organization use at most "
                f"{MAX_NAMESPACE_CHARACTERS}, because those of organizations are longer"
            )
        return self

    @field_validator("scratch_limit")
    @classmethod
    def check_scratch_limit(cls, value: str | None) -> str | None:
        return None if value is None else validate_quantity(value)

    @field_validator("backend")
    @classmethod
    def backend_exists(cls, value: str) -> str:
        return check_backend(value)

    @field_validator("devices", mode="before")
    @classmethod
    def normalize_names(cls, value: Any) -> Any:
        """Return device names as unique strings.

        A job would wait forever for a device that is named twice or is empty.
        """
        if not isinstance(value, list | tuple):
            return value
        return tuple(dict.fromkeys(name for each in value if (name := str(each).strip())))
