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
    """Return torchrun's defaults for a user's command, such as the number of nodes.

    Arguments of the command override them. The rank is in the variable PET_NODE_RANK, which the pod declares.
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
    """Return NCCL's variables for the setting `rdma`.

    `auto` leaves the choice to NCCL, which uses InfiniBand if available, else TCP. `enabled` fails rather than being slow.
    `disabled` uses TCP even if the image has a network plugin. A single node needs no network, and NCCL would fail if
    configured for one that its pod does not have.
    """
    if distributed is None or distributed.backend != "nccl" or distributed.num_nodes == 1:
        return {}
    tcp = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    return {"auto": {}, "enabled": {"NCCL_NET": "IB"}, "disabled": tcp}[distributed.rdma]


# A pod of a gang: restricted Pod Security profile, read-only root file system, scratch volumes, the job as a file.

USER_ID = 10001
"""User of our images (deploy/images); set here too, so that no image can choose root."""

RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
CONTAINER = "program"
LOST_NODE_SECONDS = 5
"""How long pods stay on an unreachable node after the cluster has detected it (40 s). Kubernetes' default is 300 s."""
FORCE_DELETE = {"kueue.x-k8s.io/safe-to-forcefully-delete": "true"}
"""Lets Kueue remove pods of a lost node, which otherwise stay `Terminating` forever. Attempt numbers fence off programs that
still run."""


def job_document(gang: Gang) -> dict[str, Any]:
    """Return the ConfigMap with the job document.

    It contains no secrets: keys are passed through the environment.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(gang),
        "immutable": True,
        "data": {JOB_FILE.rpartition("/")[2]: gang.job.model_dump_json(indent=1) + "\n"},
    }


def metadata(gang: Gang, **more_labels: str) -> dict[str, Any]:
    """Return the metadata of a gang's object."""
    return {
        "name": gang.name,
        "namespace": gang.namespace,
        "labels": labels(gang.job) | more_labels,
        "annotations": annotations(gang.job, gang.generation),
    }


def pod_template(gang: Gang, rank_0: str, subdomain: str | None = None) -> dict[str, Any]:
    """Return the pod template of a gang.

    `subdomain` is the Service that gives the pods host names, unless a JobSet sets it.
    """
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # the whole gang restarts
        "terminationGracePeriodSeconds": gang.job.schedule.grace_seconds,
        "automountServiceAccountToken": False,
        "shareProcessNamespace": True,  # PID 1 ignores SIGTERM without a handler
        "enableServiceLinks": False,  # no variables of every Service of the namespace
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
        # NCCL and data loaders use shared memory, of which a container has only 64 MiB by default.
        spec["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if gang.node_labels:
        spec["nodeSelector"] = gang.node_labels
    pod_annotations = annotations(gang.job, gang.generation) | FORCE_DELETE
    return {"metadata": {"labels": labels(gang.job), "annotations": pod_annotations}, "spec": spec}


def claims(gang: Gang) -> list[dict[str, Any]]:
    """Return one volume per claim, which may be mounted at several paths."""
    read_only = {
        claim: all(volume.read_only for volume in gang.volumes if volume.claim == claim)
        for claim in dict.fromkeys(volume.claim for volume in gang.volumes)
    }
    return [
        {"name": volume_name(claim), "persistentVolumeClaim": {"claimName": claim, "readOnly": is_read_only}}
        for claim, is_read_only in read_only.items()
    ]


def volume_name(claim: str) -> str:
    """Return a DNS-1123 label for a claim, whose name may be longer than a label."""
    return f"claim-{hashlib.sha256(claim.encode()).hexdigest()[:10]}"


def tolerations(gang: Gang) -> list[dict[str, Any]]:
    """Return tolerations for GPU nodes, the job's own, and short ones for lost nodes."""
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
        # The last log lines say why a program ended: the controller reads them from the pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def environment(gang: Gang, rank_0: str) -> list[dict[str, Any]]:
    """Return variables of the launcher, which starts the program with them.

    `HANZO_ML_PROCESSES` is 0 without torchrun.
    """
    # Images have no entry for our user id: libraries that look up the user's name or home directory find them here.
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
    """Escape a value for Kubernetes, which expands `$(NAME)` and turns `$$` into `$`."""
    return value.replace("$", "$$")


def resources(gang: Gang) -> dict[str, Any]:
    """Return resources of a pod.

    Requests equal limits, so that a job gets what it was admitted with and cannot use more.
    """
    wanted = {
        "cpu": str(gang.cpu) if gang.cpu else None,
        "memory": gang.memory,
        "nvidia.com/gpu": str(gang.gpus) if gang.gpus else None,
    }
    if gang.rdma:  # memory registration is allowed by the node's container runtime: no pod may request IPC_LOCK
        wanted[gang.rdma] = "1"
    given = {name: amount for name, amount in wanted.items() if amount is not None}
    return {"requests": given, "limits": given} if given else {}
