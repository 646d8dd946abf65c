"""What a program says of what it made: the types of `Result.facts`."""

from collections.abc import Container

from pydantic import JsonValue

from recipes.contracts.frozen_model import Frozen
from recipes.contracts.recovery_log import Incident

TRAINED = ("adapter", "weights")
"""What training leaves, as role and kind of its artifact: an adapter beside its base model, or weights in its stead."""


def trained_role(artifacts: Container[str]) -> str:
    """Which of `TRAINED` is among the artifacts of a job. Raises KeyError where none is."""
    for role in TRAINED:
        if role in artifacts:
            return role
    raise KeyError(TRAINED[0])


class TrainingFacts(Frozen):
    """`Result.facts` of the program train: what its run used, over all restarts, and what happened to it.

    `losses` maps a step to its loss. `resumed_from`, `best_step` and `published_step` are steps: of the checkpoint that the
    last process went on from, of the one with the lowest validation loss, and the one whose weights the run left. Times are
    in seconds, memory is in bytes (of the GPU where there is one); `checkpoint_share` is the share of `train_seconds` in
    which the loop stood still for a checkpoint. `gpus` are those that the last process held on all nodes, `gpu_seconds` are
    those of each one, of which there may have been more at one time than at another. `tokens` counts those trained on,
    with the padding of packed rows. `unsent_metrics` counts the points that the tracking server did not get: they lie beside
    the result (`recipes.unsent_metrics`).
    """

    train_seconds: float
    gpus: int | None = None  # a program of before, which runs on while all else is renewed, does not say
    gpu_seconds: float = 0.0
    resumed_from: int | None
    unsent_metrics: int
    losses: dict[int, float | None]
    best_step: int | None = None
    published_step: int
    incidents: tuple[Incident, ...] = ()
    tokens: int
    peak_memory: int
    checkpoint_seconds: float
    longest_checkpoint: float
    checkpoint_share: float


class ModelScores(Frozen):
    """What one model got: mean loss in nats and its exponential, null where not finite, and the share of right answers."""

    loss: float | None
    perplexity: float | None
    accuracy: float


class EvaluationReport(Frozen):
    """`Result.facts["report"]` of the program evaluate: scores by model, and every question with each model's answer.

    `left_out` are the records that the chat template refused; `num_records` are those that were asked.
    """

    scores: dict[str, ModelScores]
    num_records: int
    left_out: int = 0
    samples: list[dict[str, JsonValue]]
    questions: list[dict[str, JsonValue]]
