"""Pod template: security profile, volumes, environment and the launcher's command."""

import hashlib
from typing import Any

from recipes.contracts.job import Distributed, Program
from recipes.launch.pod import RENDEZVOUS_PORT, RENDEZVOUS_SECONDS
from resources.compute.base import PROGRAM_ENVIRONMENT
from resources.compute.kubernetes.gang import WORK, Gang, annotations, labels
from resources.compute.kubernetes.token_secret import KEY, secret_name
from resources.jobs.job_tokens import TOKEN_VARIABLE

JOB_FILE = "/job/job.json"


def rendezvous(gang: Gang, rank_0: str) -> dict[str, str]:
    """What a command's own torchrun takes for what its words leave out, such as how many nodes there are (row Z24).

    The rank comes with the variable PET_NODE_RANK, which the pod declares.
    """
    if gang.processes is None or gang.job.program is not Program.COMMAND:
        return {}
    return {
        "PET_NNODES": str(gang.nodes),
        "PET_NPROC_PER_NODE": str(gang.processes),
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ID": gang.name,
        "PET_RDZV_CONF": f"timeout={RENDEZVOUS_SECONDS}",
        "PET_MASTER_ADDR": rank_0 if gang.nodes > 1 else "127.0.0.1",
        "PET_MASTER_PORT": str(RENDEZVOUS_PORT),
        "PET_SHUTDOWN_TIMEOUT": str(gang.job.schedule.shutdown_seconds),
    }


def network(distributed: Distributed | None) -> dict[str, str]:
    """NCCL's variables for `rdma`: `auto` leaves the choice to NCCL, which takes InfiniBand where it finds it, else TCP.

    `enabled` would rather fail than be slow, `disabled` goes over TCP also past a plugin of the image. Within a single node
    there is no network, and asked for one that its pod does not have, NCCL would fail.
    """
    if distributed is None or distributed.backend != "nccl" or distributed.num_nodes == 1:
        return {}
    tcp = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    return {"auto": {}, "enabled": {"NCCL_NET": "IB"}, "disabled": tcp}[distributed.rdma]


# One pod of a gang: the restricted Pod Security profile, a read-only root, scratch volumes, the job as a file (X3, X6).

USER_ID = 10001
"""The user of our images (deploy/images); given here too, so that no image can choose root."""

RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
CONTAINER = "program"
LOST_NODE_SECONDS = 5
"""How long pods stay on a node that does not answer, once the cluster has noticed (40 s): 300 s by default."""
FORCE_DELETE = {"kueue.x-k8s.io/safe-to-forcefully-delete": "true"}
"""Lets Kueue remove pods of a lost node, which stay `Terminating` for ever otherwise. Attempts fence off what still runs."""


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
        "annotations": annotations(gang.job, gang.generation),
    }


def pod_template(gang: Gang, rank_0: str, subdomain: str | None = None) -> dict[str, Any]:
    """The pods of a gang; `subdomain` is the Service that gives them host names, where nobody else sets it."""
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # a restart is the whole gang's
        "terminationGracePeriodSeconds": gang.job.schedule.grace_seconds,
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
        "tolerations": tolerations(gang),
        "containers": [container(gang, rank_0)],
        "volumes": [
            {"name": "job", "configMap": {"name": gang.name}},
            {"name": "work", "emptyDir": {"sizeLimit": gang.scratch_limit} if gang.scratch_limit else {}},
            {"name": "tmp", "emptyDir": {}},
            *claims(gang),
        ],
    }
    if gang.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in gang.image_pull_secrets]
    if subdomain:
        spec["subdomain"] = subdomain
    if gang.processes:
        # NCCL and data loaders share memory, and 64 MiB is what a container gets otherwise.
        spec["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if gang.node_labels:
        spec["nodeSelector"] = gang.node_labels
    pod_annotations = annotations(gang.job, gang.generation) | FORCE_DELETE
    return {"metadata": {"labels": labels(gang.job), "annotations": pod_annotations}, "spec": spec}


def claims(gang: Gang) -> list[dict[str, Any]]:
    """The volumes of the job's claims: one for each claim, however many paths it is mounted at."""
    read_only = {
        claim: all(volume.read_only for volume in gang.volumes if volume.claim == claim)
        for claim in dict.fromkeys(volume.claim for volume in gang.volumes)
    }
    return [
        {"name": volume_name(claim), "persistentVolumeClaim": {"claimName": claim, "readOnly": is_read_only}}
        for claim, is_read_only in read_only.items()
    ]


def volume_name(claim: str) -> str:
    """A DNS-1123 label, which has fewer characters than the name of a claim may have."""
    return f"claim-{hashlib.sha256(claim.encode()).hexdigest()[:10]}"


def tolerations(gang: Gang) -> list[dict[str, Any]]:
    """Taints that the pods accept: those of GPU nodes and the job's own, and for a moment those of nodes that were lost."""
    lost = [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": LOST_NODE_SECONDS,
        }
        for taint in ("not-ready", "unreachable")
    ]
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    own = [toleration.model_dump(exclude_none=True) for toleration in gang.tolerations]
    return [*lost, *([gpu] if gang.gpus else []), *own]


def container(gang: Gang, rank_0: str) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "job", "mountPath": JOB_FILE.rpartition("/")[0], "readOnly": True},
        {"name": "work", "mountPath": WORK},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if gang.processes:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    for volume in gang.volumes:
        mount = {"name": volume_name(volume.claim), "mountPath": volume.path, "readOnly": volume.read_only}
        mounts.append(mount | ({"subPath": volume.sub_path} if volume.sub_path else {}))
    secrets = (*([gang.secret] if gang.secret else []), *gang.job.pod.secrets)
    return {
        "name": CONTAINER,
        "image": gang.image,
        "command": ["python", "-m", "recipes.launcher", JOB_FILE],
        "env": environment(gang, rank_0),
        **({"envFrom": [{"secretRef": {"name": name}} for name in secrets]} if secrets else {}),
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
    """Variables of the launcher, which starts the program with them. `HANZO_ML_PROCESSES` is 0 without torchrun."""
    # No image knows our user id: libraries that ask for the user's name or home find them here.
    values = {} if gang.job.program is Program.COMMAND else PROGRAM_ENVIRONMENT
    values = values | {"HOME": WORK, "USER": "hanzo-ml"} | network(gang.job.distributed) | gang.job.env
    values |= rendezvous(gang, rank_0) | {
        "HANZO_ML_API": gang.api,
        "HANZO_ML_GENERATION": str(gang.generation),
        "HANZO_ML_RANK_0": rank_0 if gang.nodes > 1 else "127.0.0.1",
        "HANZO_ML_NODES": str(gang.nodes),
        "HANZO_ML_PROCESSES": "0" if gang.job.program is Program.COMMAND else str(gang.processes or 0),
    }
    fields = {"NODE_RANK": RANK, "POD_UID": "metadata.uid", "POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName"}
    if gang.processes and gang.job.program is Program.COMMAND:
        fields["PET_NODE_RANK"] = RANK
    token = {"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": {"name": secret_name(gang), "key": KEY}}}
    return [
        *({"name": name, "value": escape(value)} for name, value in values.items() if name not in {TOKEN_VARIABLE, *fields}),
        token,
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]


def escape(value: str) -> str:
    """The value as Kubernetes is given it: it expands `$(NAME)`, and makes `$$` a `$`."""
    return value.replace("$", "$$")


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
