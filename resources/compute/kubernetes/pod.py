"""One pod of a gang: the restricted Pod Security profile, a read-only root, scratch volumes, the job as a file (X3, X6)."""

from typing import Any

from recipes.contracts.job import Program
from resources.compute.base import GRACE_SECONDS
from resources.compute.environment import PROGRAM_ENVIRONMENT
from resources.compute.kubernetes.gang import WORK, Gang
from resources.compute.kubernetes.names import annotations, labels
from resources.compute.kubernetes.token_secret import KEY, secret_name
from resources.compute.kubernetes.torchrun import JOB_FILE, command, network, rendezvous
from resources.jobs.credentials import TOKEN_VARIABLE

USER_ID = 10001
"""The user of deploy/Containerfile; given here too, so that no image can choose root."""

RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
CONTAINER = "program"


def job_document(gang: Gang) -> dict[str, Any]:
    """The ConfigMap that carries the job to its pods. A job holds no secret: keys come through the environment."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(gang),
        "immutable": True,
        "data": {JOB_FILE.rpartition("/")[2]: gang.job.model_dump_json(indent=1) + "\n"},
    }


def metadata(gang: Gang, **more_labels: str) -> dict[str, Any]:
    """Of an object that is applied."""
    return {
        "name": gang.name,
        "namespace": gang.namespace,
        "labels": labels(gang.job) | more_labels,
        "annotations": annotations(gang.job),
    }


def pod_template(gang: Gang, rank_0: str, subdomain: str | None = None) -> dict[str, Any]:
    """The pods of a gang; `subdomain` is the Service that gives them host names, where nobody else sets it."""
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # a restart is the whole gang's
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "shareProcessNamespace": True,  # a process with the id 1 hears no SIGTERM that it has not asked for
        "enableServiceLinks": False,  # else every Service of the namespace would put its variables into the pod
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container(gang, rank_0)],
        "volumes": [
            {"name": "job", "configMap": {"name": gang.name}},
            {"name": "work", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    if subdomain:
        spec["subdomain"] = subdomain
    if gang.processes:
        # NCCL and data loaders share memory, and 64 MiB is what a container gets otherwise.
        spec["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if gang.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if gang.node_labels:
        spec["nodeSelector"] = gang.node_labels
    return {"metadata": {"labels": labels(gang.job), "annotations": annotations(gang.job)}, "spec": spec}


def container(gang: Gang, rank_0: str) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "job", "mountPath": JOB_FILE.rpartition("/")[0], "readOnly": True},
        {"name": "work", "mountPath": WORK},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if gang.processes:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return {
        "name": CONTAINER,
        "image": gang.image,
        "command": command(gang, rank_0),
        "env": environment(gang, rank_0),
        "envFrom": [{"secretRef": {"name": gang.secret}}],
        "resources": resources(gang),
        # The last lines of the log say why a program ended: whoever follows reads them from the pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def environment(gang: Gang, rank_0: str) -> list[dict[str, Any]]:
    # No image knows our user id: libraries that ask for the user's name or home find them here.
    values = {} if gang.job.program is Program.COMMAND else PROGRAM_ENVIRONMENT
    values = values | {"HOME": WORK, "USER": "hanzo-ml"} | network(gang.job.distributed) | rendezvous(gang, rank_0)
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    if gang.job.tracking is not None:
        # Optional: a job that is applied by hand has no token, and runs all the same.
        token = {"name": secret_name(gang), "key": KEY, "optional": True}
        variables.append({"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": token}})
    if gang.processes or gang.shares:
        name = "PET_NODE_RANK" if gang.job.program is Program.COMMAND else "NODE_RANK"
        variables.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": RANK}}})
    return variables


def resources(gang: Gang) -> dict[str, Any]:
    """Requests equal limits, so that a job gets what it was admitted with and takes nothing from its neighbours."""
    wanted = {
        "cpu": str(gang.cpu) if gang.cpu else None,
        "memory": gang.memory,
        "nvidia.com/gpu": str(gang.gpus) if gang.gpus else None,
    }
    if gang.rdma:  # the memory that its card registers, the node's container runtime allows: no pod may ask for IPC_LOCK
        wanted[gang.rdma] = "1"
    given = {name: amount for name, amount in wanted.items() if amount is not None}
    return {"requests": given, "limits": given} if given else {}
