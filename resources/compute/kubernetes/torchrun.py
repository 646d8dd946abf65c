"""How the processes of a pod start: the program itself, or torchrun with the rendezvous of its gang (rows H1, H8, Z24).

Static rendezvous: rank 0 is pod 0, whose name is known before it runs. Nothing is elastic here, because a gang that loses a
pod restarts as a whole from its last checkpoint (facts/kubernetes.md, pitfall 2).
"""

from recipes.contracts.job import Distributed, Program
from resources.compute.base import SHUTDOWN_SECONDS
from resources.compute.kubernetes.gang import Gang

JOB_FILE = "/job/job.json"
RENDEZVOUS_PORT = 29500
RENDEZVOUS_SECONDS = 900
"""More than the grace: Kueue frees quota when pods start to end, so ours may wait that long for room (pitfall 1)."""


def command(gang: Gang, rank_0: str) -> list[str]:
    """The command of every pod of a gang; `rank_0` is the host name of its first.

    `$(NODE_RANK)` is expanded by Kubernetes from the variable of that name, which the pod declares.
    """
    program = ["-m", f"recipes.{gang.job.program}", JOB_FILE]
    if gang.processes is None or gang.job.program is Program.COMMAND:
        return ["python", *program, *(["$(NODE_RANK)"] if gang.shares else [])]
    return [
        "python",
        "-m",
        "recipes.torchrun",
        f"--nnodes={gang.nodes}",
        f"--nproc-per-node={gang.processes}",
        "--node-rank=$(NODE_RANK)",
        "--rdzv-backend=static",
        f"--rdzv-id={gang.name}",
        f"--rdzv-conf=timeout={RENDEZVOUS_SECONDS}",
        f"--master-addr={rank_0 if gang.nodes > 1 else '127.0.0.1'}",
        f"--master-port={RENDEZVOUS_PORT}",
        "--max-restarts=0",
        f"--shutdown-timeout={SHUTDOWN_SECONDS}",
        *program,
    ]


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
        "PET_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
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
