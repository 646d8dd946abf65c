"""What a program says of what it made: the types of `Result.facts`."""

from collections.abc import Container

from pydantic import JsonValue

from recipes.schema import Frozen

TRAINED = ("adapter", "weights")
"""What training leaves, as role and kind of its artifact: an adapter beside its base model, or weights in its stead."""


def trained_role(artifacts: Container[str]) -> str:
    """Which of `TRAINED` is among the artifacts of a job. Raises KeyError where none is."""
    for role in TRAINED:
        if role in artifacts:
            return role
    raise KeyError(TRAINED[0])


class TrainingFacts(Frozen):
    """`Result.facts` of the program train: `losses` maps a step to its loss, `resumed_from` is a step."""

    train_seconds: float
    resumed_from: int | None
    unsent_metrics: int
    losses: dict[int, float | None]


class ModelScores(Frozen):
    """What one model got: mean loss in nats and its exponential, null where not finite, and the share of right answers."""

    loss: float | None
    perplexity: float | None
    accuracy: float


class EvaluationReport(Frozen):
    """`Result.facts["report"]` of the program evaluate: scores by model, and every question with each model's answer."""

    scores: dict[str, ModelScores]
    num_records: int
    samples: list[dict[str, JsonValue]]
    questions: list[dict[str, JsonValue]]
