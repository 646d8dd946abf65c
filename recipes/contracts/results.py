"""What a program reports beside its artifacts - facts, resource usage, unsent metrics."""

from collections.abc import Container, Iterable, Iterator

from pydantic import ConfigDict, JsonValue

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import Job, Machine
from recipes.contracts.recovery_log import RecoveryEvent
from recipes.runner import log_line
from recipes.storage.artifact_store import Store

# Points of a run that its tracking server did not get: they come beside its result, and whoever records that logs them.
#
# A program that waited for the server instead held its GPUs meanwhile, and lost the points after ten minutes all the
# same.

UNSENT_METRICS_FILE = "unsent_metrics.jsonl"


class UnsentPoint(FrozenModel):
    """One value of a metric; `timestamp` in ms since 1970. JSON has no NaN and no infinity: they are words there.

    `anew` says that the run did this step otherwise than the first time, whose value may be there too: from up to `since`,
    in ms since 1970. Where that was not written down, nobody knows which is whose.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    key: str
    value: float
    step: int
    timestamp: int
    anew: bool = False
    since: int | None = None


def write_unsent_metrics(store: Store, folder: str, points: Iterable[UnsentPoint]) -> None:
    """Beside the result in `folder`, in place of what an earlier end of the run has left."""
    store.put_bytes(f"{folder}/{UNSENT_METRICS_FILE}", "".join(f"{point.model_dump_json()}\n" for point in points).encode())


def read_unsent_metrics(store: Store, folder: str) -> Iterator[UnsentPoint]:
    """Raises FileNotFoundError where none were left."""
    return map(UnsentPoint.model_validate_json, store.get_bytes(f"{folder}/{UNSENT_METRICS_FILE}").splitlines())


# What a run has used so far, as one small document beside its result; no torch in here.
#
# One that fails after ten hours has cost ten hours. So its program writes it down as it goes on, over all its restarts,
# and whoever wants to know reads it, however the run has ended.

USAGE_FILE = "usage.json"


class Usage(FrozenModel):
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


def result_folder(job: Job) -> str:
    """The logical URI of the folder that holds a job's result, and what its run has used."""
    return job.result_uri.rpartition("/")[0]


def read_usage(store: Store, folder: str) -> Usage:
    """Nothing where nothing was written down yet."""
    try:
        return Usage.model_validate_json(store.get_bytes(f"{folder}/{USAGE_FILE}"))
    except FileNotFoundError:
        return Usage()


def write_usage(store: Store, folder: str, usage: Usage) -> None:
    """Where the store is away, the log says so: no run ends for that, or ends otherwise than it would have."""
    try:
        store.put_bytes(f"{folder}/{USAGE_FILE}", usage.model_dump_json(indent=1).encode())
    except Exception as error:
        log_line(f"what the run has used was not written down: {type(error).__name__}: {' '.join(str(error).split())}")


# What a program says of what it made: the types of `Result.facts`.

TRAINED_ROLES = ("adapter", "weights")
"""What training leaves, as role and kind of its artifact: an adapter beside its base model, or weights in its stead."""


def find_trained_role(artifacts: Container[str]) -> str:
    """Which of `TRAINED_ROLES` is among the artifacts of a job. Raises KeyError where none is."""
    for role in TRAINED_ROLES:
        if role in artifacts:
            return role
    raise KeyError(TRAINED_ROLES[0])


class TrainingFacts(FrozenModel):
    """`Result.facts` of the program train: what its run used, over all restarts, and what happened to it.

    `losses` maps a step to its loss. `resumed_from`, `best_step` and `published_step` are steps: of the checkpoint that the
    last process went on from, of the one with the lowest validation loss, and the one whose weights the run left. Times are
    in seconds, memory is in bytes (of the GPU where there is one); `checkpoint_share` is the share of `train_seconds` in
    which the loop stood still for a checkpoint. `gpus` are those that the last process held on all nodes, `gpu_seconds` are
    those of each one, of which there may have been more at one time than at another. `tokens` counts those trained on,
    with the padding of packed rows. `unsent_metrics` counts the points that the tracking server did not get: they lie beside
    the result, in `UNSENT_METRICS_FILE`.
    """

    train_seconds: float
    gpus: int | None = None  # a program of before, which runs on while all else is renewed, does not say
    gpu_seconds: float = 0.0
    resumed_from: int | None
    unsent_metrics: int
    losses: dict[int, float | None]
    best_step: int | None = None
    published_step: int
    incidents: tuple[RecoveryEvent, ...] = ()
    tokens: int
    peak_memory: int
    checkpoint_seconds: float
    longest_checkpoint: float
    checkpoint_share: float


class ModelScores(FrozenModel):
    """What one model got: mean loss in nats and its exponential, null where not finite, and the share of right answers."""

    loss: float | None
    perplexity: float | None
    accuracy: float


class EvaluationReport(FrozenModel):
    """`Result.facts["report"]` of the program evaluate: scores by model, and every question with each model's answer.

    `left_out` are the records that the chat template refused; `num_records` are those that were asked.
    """

    scores: dict[str, ModelScores]
    num_records: int
    left_out: int = 0
    samples: list[dict[str, JsonValue]]
    questions: list[dict[str, JsonValue]]
