"""What a run has used so far, as one small document beside its result; no torch in here.

One that fails after ten hours has cost ten hours. So its program writes it down as it goes on, over all its restarts, and
whoever wants to know reads it, however the run has ended.
"""

from recipes.contracts.frozen_model import Frozen
from recipes.contracts.job import Job, Machine
from recipes.runner import say
from recipes.storage.artifact_store import Store

NAME = "usage.json"


class Usage(Frozen):
    """Times in seconds: `seconds` of the training loop, or of the command, in all processes of the run that followed each
    other, what a kill made them do twice included; `checkpoints` of that, those in which the loop stood still for one.

    `gpus` counts those on all nodes now; a run that goes on may have more or fewer than before, so that `gpu_seconds` are
    those of each one, also while the model is loaded and published. `tokens` are those of `steps`;
    `peak_memory` is in bytes. `machine` is on what a training computed.
    """

    seconds: float = 0.0
    gpus: int = 0
    gpu_seconds: float = 0.0
    checkpoints: float = 0.0
    longest_checkpoint: float = 0.0
    num_checkpoints: int = 0
    peak_memory: int = 0
    steps: int = 0
    tokens: int = 0
    machine: Machine | None = None

    @property
    def checkpoint_share(self) -> float:
        """The share of the time in which the loop stood still for a checkpoint."""
        return self.checkpoints / self.seconds if self.seconds else 0.0

    @property
    def gpu_hours(self) -> float:
        return self.gpu_seconds / 3600


def folder_of(job: Job) -> str:
    """The logical URI of the folder that holds a job's result, and what its run has used."""
    return job.result_uri.rpartition("/")[0]


def read_usage(store: Store, folder: str) -> Usage:
    """Nothing where nothing was written down yet."""
    try:
        return Usage.model_validate_json(store.get_bytes(f"{folder}/{NAME}"))
    except FileNotFoundError:
        return Usage()


def write_usage(store: Store, folder: str, usage: Usage) -> None:
    """Where the store is away, the log says so: no run ends for that, or ends otherwise than it would have."""
    try:
        store.put_bytes(f"{folder}/{NAME}", usage.model_dump_json(indent=1).encode())
    except Exception as error:
        say(f"what the run has used was not written down: {type(error).__name__}: {' '.join(str(error).split())}")
