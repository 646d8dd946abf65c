"""A finished run once more, and whether the same came out (rows Y11, Y12)."""

from typing import Literal

from api.openapi.v1.jobs import Job
from api.schemas.mlflow.responses import Message

Loss = float | Literal["not finite", "missing"]


class EnvironmentDifference(Message):
    what: str
    then: str
    now: str


class Replay(Message):
    """The job that was queued, and in what its environment differs from the first run's."""

    job: Job
    environment: list[EnvironmentDifference]


class StepDifference(Message):
    """The losses of the first step at which the two runs part."""

    step: int
    then: Loss
    now: Loss


class FileDifference(Message):
    """SHA-256 of a file of weights in both runs; null where one does not have it."""

    path: str
    then: str | None
    now: str | None


class UnrepeatedIncident(Message):
    """An incident that only one of the two runs had."""

    of: Literal["run", "replay"]
    kind: Literal["out_of_memory", "diverged", "not_deterministic", "not_compiled"]
    step: int | None
    what: str


class ReplayVerdict(Message):
    """`equal` means every loss and the hash of the final weights, and that the first run is tracked with the losses that it
    had: `untrue` is the first step at which it is not, `then` as it had it and `now` as it is tracked.
    """

    run: str
    replay: str
    equal: bool
    steps: int
    first_difference: StepDifference | None
    untrue: StepDifference | None
    weights: list[FileDifference]
    environment: list[EnvironmentDifference]
    unrepeated: list[UnrepeatedIncident]
