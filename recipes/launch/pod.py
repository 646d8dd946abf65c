"""A pod's place in its gang, from environment variables in its manifest."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from recipes.contracts.job import Job, Program
from recipes.storage.signed_bucket import TOKEN_VARIABLE

HEARTBEAT_PORT = 29400
RENDEZVOUS_PORT = 29500
RENDEZVOUS_SECONDS = 900
"""How long nodes wait for each other: longer than the grace period of pods, which may hold our quota until its end."""
KEY_CONTEXT = b"hanzo-ml heartbeat"


@dataclass(frozen=True)
class Pod:
    """A pod's identity and settings.

    `first_host` is the host name of the pod with rank 0. `processes` is torchrun's number of processes per pod, 0 without
    torchrun.
    """

    node_rank: int
    uid: str
    name: str
    node: str
    generation: int
    first_host: str
    num_nodes: int
    processes: int
    api: str
    token: str
    heartbeat_port: int = HEARTBEAT_PORT
    rendezvous_port: int = RENDEZVOUS_PORT

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Self:
        """Read the environment of a pod.

        Raises:
            KeyError: the manifest lacks a variable.
        """
        return cls(
            node_rank=int(variables["NODE_RANK"]),
            uid=variables["POD_UID"],
            name=variables["POD_NAME"],
            node=variables["NODE_NAME"],
            generation=int(variables["HANZO_ML_GENERATION"]),
            first_host=variables["HANZO_ML_RANK_0"],
            num_nodes=int(variables["HANZO_ML_NODES"]),
            processes=int(variables["HANZO_ML_PROCESSES"]),
            api=variables["HANZO_ML_API"].rstrip("/"),
            token=variables[TOKEN_VARIABLE].strip(),
            heartbeat_port=int(variables.get("HANZO_ML_HEARTBEAT_PORT", HEARTBEAT_PORT)),
            rendezvous_port=int(variables.get("HANZO_ML_RENDEZVOUS_PORT", RENDEZVOUS_PORT)),
        )

    @property
    def is_first(self) -> bool:
        return self.node_rank == 0

    @property
    def heartbeat_key(self) -> bytes:
        """The gang's shared secret, derived from the job's token, which only this gang has."""
        return hmac.digest(self.token.encode(), KEY_CONTEXT, hashlib.sha256)

    def shares_work(self, job: Job) -> bool:
        """Return whether the pods of this program coordinate through the store and restart independently."""
        return self.num_nodes > 1 and self.processes == 0 and job.program is not Program.COMMAND
