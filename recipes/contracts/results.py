"""Reports of a program in addition to artifacts: facts, resource usage, unsent metrics."""

from collections.abc import Container, Iterable, Iterator

from pydantic import ConfigDict, JsonValue

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import Job, Machine
from recipes.contracts.recovery_log import RecoveryEvent
from recipes.runner import log_line
from recipes.storage.artifact_store import Store

# Metric points that the tracking server did not receive are stored next to the result, and logged when the result is
# recorded.
#
# A program that waited for the server instead held its GPUs meanwhile, and still lost the points after ten minutes.

UNSENT_METRICS_FILE = "unsent_metrics.jsonl"


class UnsentPoint(FrozenModel):
    """One value of a metric; `timestamp` is in ms since 1970.

    NaN and infinity are encoded as strings. `anew` marks a step that the run repeated, whose first value may have been
    logged too: values from before `since`, in ms since 1970. If that was not recorded, the two cannot be distinguished.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    key: str
    value: float
    step: int
    timestamp: int
    anew: bool = False
    since: int | None = None


def write_unsent_metrics(store: Store, folder: str, points: Iterable[UnsentPoint]) -> None:
    """Write points next to the result in `folder`, replacing earlier ones."""
    store.put_bytes(f"{folder}/{UNSENT_METRICS_FILE}", "".join(f"{point.model_dump_json()}\n" for point in points).encode())


def read_unsent_metrics(store: Store, folder: str) -> Iterator[UnsentPoint]:
    """Read the unsent points. Raises FileNotFoundError if there are none."""
    return map(UnsentPoint.model_validate_json, store.get_bytes(f"{folder}/{UNSENT_METRICS_FILE}").splitlines())


# The resource usage of a run, a small document next to its result. Free of torch.
#
# A run that fails after ten hours has cost ten hours. Its program records usage while it runs, over all restarts, so that it
# is known however the run ends.

USAGE_FILE = "usage.json"


class Usage(FrozenModel):
    """Resource usage of a run. Times are in seconds.

    Attributes:
        seconds: duration of the training loop, or of the command, over all attempts, including work repeated after a kill.
        gpus: number of GPUs on all nodes now; a resumed run may have more or fewer than before.
        gpu_seconds: GPU time of each GPU, also while the model is loaded and published.
        checkpoints: part of `seconds` in which the loop was stalled by checkpoints.
        peak_memory: in bytes.
        tokens: number of tokens in `steps`.
        machine: the machine that a training ran on.
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
        """Share of time in which the loop was stalled by checkpoints."""
        return self.checkpoints / self.seconds if self.seconds else 0.0

    @property
    def gpu_hours(self) -> float:
        return self.gpu_seconds / 3600


def result_folder(job: Job) -> str:
    """Return the logical URI of the folder with a job's result and usage."""
    return job.result_uri.rpartition("/")[0]


def read_usage(store: Store, folder: str) -> Usage:
    """Read the recorded usage; zero if there is none yet."""
    try:
        return Usage.model_validate_json(store.get_bytes(f"{folder}/{USAGE_FILE}"))
    except FileNotFoundError:
        return Usage()


def write_usage(store: Store, folder: str, usage: Usage) -> None:
    """Record the usage.

    Errors of the store are only logged: they must not affect how the run ends.
    """
    try:
        store.put_bytes(f"{folder}/{USAGE_FILE}", usage.model_dump_json(indent=1).encode())
    except Exception as error:
        log_line(f"resource usage was not recorded: {type(error).__name__}: {' '.join(str(error).split())}")


# The types of `Result.facts`.

TRAINED_ROLES = ("adapter", "weights")
"""Roles and kinds of training outputs: an adapter for the base model, or complete weights."""


def find_trained_role(artifacts: Container[str]) -> str:
    """Return which of `TRAINED_ROLES` is among a job's artifacts. Raises KeyError if none is."""
    for role in TRAINED_ROLES:
        if role in artifacts:
            return role
    raise KeyError(TRAINED_ROLES[0])


class TrainingFacts(FrozenModel):
    """`Result.facts` of the program train: the run's usage over all restarts, and its events.

    Times are in seconds, memory is in bytes (of the GPU if there is one).

    Attributes:
        gpus: number of GPUs of the last attempt on all nodes; `gpu_seconds` sums over all attempts, whose numbers may
        differ. resumed_from: step of the checkpoint that the last attempt started from.
        unsent_metrics: number of points that the tracking server did not receive; they are in `UNSENT_METRICS_FILE`.
        losses: training loss by step.
        best_step: step of the checkpoint with the lowest validation loss.
        published_step: step of the published weights.
        tokens: number of trained tokens, including the padding of packed rows.
        checkpoint_share: share of `train_seconds` in which the loop was stalled by checkpoints.
    """

    train_seconds: float
    gpus: int | None = None  # missing in results of older programs that finish after an upgrade
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
    """Scores of a model: mean loss in nats, perplexity, and share of correct answers.

    None if not finite.
    """

    loss: float | None
    perplexity: float | None
    accuracy: float


class EvaluationReport(FrozenModel):
    """`Result.facts["report"]` of the program evaluate: scores by model, and each model's answers.

    `left_out` counts records that the chat template rejected; `num_records` counts evaluated ones.
    """

    scores: dict[str, ModelScores]
    num_records: int
    left_out: int = 0
    samples: list[dict[str, JsonValue]]
    questions: list[dict[str, JsonValue]]
