"""The section `scheduler` of `config.yaml`: what runs jobs, how many, and what the pods of a cluster get."""

from ipaddress import ip_network
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from recipes.contracts.job import Priority
from recipes.contracts.pod_settings import ObjectName, Toleration, VolumeClaim
from recipes.contracts.quantities import Duration, validate_quantity
from resources.compute.backends import check_backend
from resources.settings.sections import Section


class PriorityClasses(Section):
    """Kueue's WorkloadPriorityClass for each priority of a job (checklist Z10: production is the highest)."""

    low: str = "interactive"
    medium: str = "batch"
    high: str = "production"


class Quota(Section):
    """What the jobs of an organization take at most at a time, and how they stand to those of others (row J2)."""

    max_gpus: int | None = Field(None, ge=0, description="on all nodes of all its jobs that run; no limit when unset")
    max_concurrent_jobs: int | None = Field(None, ge=1)
    priority: Priority | None = Field(None, description="of its jobs at most, and of those that say none")
    preemptible: bool = Field(False, description="whether the nodes of all its jobs may be taken away")


class Capacity(Section):
    """What jobs may use at a time of the nodes with one type of GPU, or of those without: Kueue's nominal quota."""

    gpus: int = Field(0, ge=0)
    cpu: int = Field(ge=0)
    memory: Annotated[str, AfterValidator(validate_quantity)]


class Egress(Section):
    """What pods of jobs may connect to besides the API, the object store, DNS and their own gang."""

    cidr: str | None = Field(None, description="addresses, such as 10.0.0.0/8")
    namespace: str | None = Field(None, description="of the pods that are meant, in place of addresses")
    pods: dict[str, str] = Field({}, description="labels of the pods in the namespace; all of them when empty")
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field((), description="of TCP and UDP; all when empty")

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
"""Of the namespace that others are derived from: with an organization and a hash it must be a DNS label of 63."""

CPU_FLAVOR = "cpu"
"""Key of `scheduler.capacity` for nodes without GPUs."""


class Scheduler(Section):
    backend: str = Field("local", description="what runs jobs: a folder of resources/compute")
    kubeconfig: str | None = Field(
        None, description="file that leads to the cluster; the service account of this process's pod when unset"
    )
    namespace: str = "hanzo-ml"
    namespace_per_organization: bool = Field(
        False,
        description="run jobs of each organization but `default` in a namespace of its own, {namespace}-{organization}, "
        "that `hanzo-ml tenant apply` makes; people who sign in may then submit commands and images of their own",
    )
    max_objects: int = Field(
        1000, ge=1, description="jobs whose objects a namespace holds at a time; further ones wait in the database"
    )
    max_storage: Annotated[str, AfterValidator(validate_quantity)] = Field(
        "10Ti", description="that the claims of a namespace may request together"
    )
    egress: tuple[Egress, ...] = Field(
        (),
        description="what pods of jobs may connect to besides the API, storage.endpoint, DNS and their own gang: "
        "{cidr, ports} or {namespace, pods, ports}",
    )
    default_image: str = "hanzoai/ml-pytorch:2.3-cuda12.4"
    gpu_types: tuple[str, ...] = ("nvidia-a100-80gb", "nvidia-a100-40gb", "nvidia-h100-80gb")
    max_concurrent_jobs: int = Field(32, ge=1)
    jobs_at_once: int | None = Field(
        None, ge=1, description="that train or evaluate on this machine; as many as it has GPUs, or one, when unset"
    )
    devices: tuple[str, ...] | None = Field(
        None, description="GPUs of this machine for jobs; those of CUDA_VISIBLE_DEVICES when unset, else all"
    )
    quotas: dict[str, Quota] = Field({}, description="of organizations, by name; one that is not named has none")
    checkpoint_bucket: str = Field(
        "hanzo-ml-checkpoints", description="bucket of checkpoints; another name for storage.buckets.checkpoints"
    )
    gang_backend: Literal["kueue", "indexed_job", "coscheduling", "volcano"] = Field(
        "kueue",
        description="what starts all pods of a job together: a JobSet behind Kueue, a plain Indexed Job, or one with the "
        "PodGroup of the Coscheduling plugin or of Volcano (checklist Z9)",
    )
    queue: str = Field("hanzo-ml", description="Kueue's LocalQueue in the namespace, or Volcano's queue")
    cluster_queue: str = Field("hanzo-ml", description="Kueue's ClusterQueue, which holds the quota of `capacity`")
    capacity: dict[str, Capacity] = Field(
        {},
        description="quota by GPU type, and of nodes without GPUs as `cpu`, for `hanzo-ml cluster render`: "
        "{gpus, cpu, memory}",
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
        description="of InfiniBand or RoCE devices, as their plugin calls it, such as rdma/hca: a pod of a job on several "
        "nodes gets one, unless distributed.rdma is disabled; none when unset",
    )
    job_secret: ObjectName | None = Field(
        None, description="Secret whose keys every pod gets as variables, such as HF_TOKEN; none when unset"
    )
    start_limit: Duration = Field(
        "10m", description="how long an admitted job, which holds its GPUs, may wait for its image or its configuration"
    )
    scratch_limit: str | None = Field(
        None,
        description="how much a pod may write to its scratch volume, such as 500Gi, until the kubelet evicts it; without a "
        "limit it may fill the disk of its node, and others are evicted too",
    )
    keep_failed_for: Duration = Field(
        "24h", description="how long pods of a failed job stay that was submitted with pod.keep_failed"
    )
    tracking_uri: str | None = Field(None, description="the API as a pod reaches it; server.host and port when unset")
    image_pull_secrets: tuple[ObjectName, ...] = Field((), description="Secrets that images are pulled with, for every pod")
    volumes: tuple[VolumeClaim, ...] = Field((), description="claims that every pod mounts, beside those of its job")
    spot_tolerations: tuple[Toleration, ...] = Field(
        (), description="taints of nodes that may be taken away, which pods of preemptible jobs accept"
    )
    user_secrets: tuple[ObjectName, ...] = Field(
        (), description="Secrets that jobs may name where people sign in, as pod.secrets or pod.image_pull_secrets"
    )
    user_claims: tuple[ObjectName, ...] = Field((), description="claims that jobs may mount where people sign in")
    user_writable_claims: tuple[ObjectName, ...] = Field((), description="those of them that they may write to")
    user_node_labels: tuple[str, ...] = Field((), description="labels that pod.node_selector may name where people sign in")
    user_tolerations: tuple[str, ...] = Field((), description="taints that pod.tolerations may name where people sign in")
    user_commands: bool = Field(
        False,
        description="whether people who sign in may submit commands to a cluster although all organizations share a "
        "namespace; with namespace_per_organization they may in any case",
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
        """As texts: YAML has numbers. What is named twice, or not at all, would be waited for for ever."""
        if not isinstance(value, list | tuple):
            return value
        return tuple(dict.fromkeys(name for each in value if (name := str(each).strip())))
