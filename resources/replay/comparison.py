"""Compare two runs: losses, weights, recoveries and environments. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import Machine
from recipes.contracts.recovery_log import RecoveryEvent
from resources.lineage.run_record import Environment

# Compares each step's loss and the hashes of the final weights. Pure functions.

Loss = float | Literal["not finite", "missing"]


class StepDifference(FrozenModel):
    """The losses at the first step where two runs differ."""

    step: int
    then: Loss
    now: Loss


class FileDifference(FrozenModel):
    """SHA-256 of a file of weights in both runs.

    Null if a run does not have it.
    """

    path: str
    then: str | None
    now: str | None


class Comparison(FrozenModel):
    """`steps` counts the compared losses.

    `first_difference` and `weights` describe where two runs differ, if they do.
    """

    steps: int
    first_difference: StepDifference | None
    weights: tuple[FileDifference, ...]

    @property
    def equal(self) -> bool:
        return self.first_difference is None and not self.weights


def compare_runs(
    then: Mapping[int, float | None],
    now: Mapping[int, float | None],
    weights_then: Mapping[str, str],
    weights_now: Mapping[str, str],
) -> Comparison:
    """Compare losses by step and SHA-256 hashes by path.

    Values are equal only if every bit is. A loss that is not finite is NaN or None, and equals any other such loss.
    """
    steps = sorted({*then, *now})
    pairs = ((step, comparable_loss(then, step), comparable_loss(now, step)) for step in steps)
    first = next((StepDifference(step=step, then=a, now=b) for step, a, b in pairs if a != b), None)
    files = [(path, weights_then.get(path), weights_now.get(path)) for path in sorted({*weights_then, *weights_now})]
    return Comparison(
        steps=len(steps),
        first_difference=first,
        weights=tuple(FileDifference(path=path, then=a, now=b) for path, a, b in files if a != b),
    )


def comparable_loss(losses: Mapping[int, float | None], step: int) -> Loss:
    """Return a step's loss in a form in which `==` has the meaning of `compare_runs`."""
    if step not in losses:
        return "missing"
    loss = losses[step]
    return loss if loss is not None and math.isfinite(loss) else "not finite"


# Incidents that only one of the two runs recovered from: from there on its micro-batches or samples differ. Pure functions.


class Unrepeated(FrozenModel):
    """An incident of the run `of`.

    `step` is null if the kernel ended the program, when the step is unknown.
    """

    of: Literal["run", "replay"]
    kind: Literal["out_of_memory", "diverged", "not_deterministic", "not_compiled"]
    step: int | None
    what: str


def find_unrepeated(then: Sequence[RecoveryEvent], now: Sequence[RecoveryEvent]) -> tuple[Unrepeated, ...]:
    """Return the incidents that only one of a run and its replay has.

    The run's come first.

    A replay uses smaller micro-batches from the same step as the first run, and skips the samples that it skipped, so it
    does not reach those divergences. It may run out of memory earlier, or once more.
    """
    return (
        *(describe_incident("run", incident) for incident in then if incident not in now),
        *(describe_incident("replay", incident) for incident in now if incident not in then),
    )


def describe_incident(of: Literal["run", "replay"], incident: RecoveryEvent) -> Unrepeated:
    return Unrepeated(of=of, kind=incident.kind, step=incident.step, what=incident.message)


# How two environments differ, as far as it may change the last bits of a number. Pure functions.

NOT_RECORDED = "not recorded"
NONE = "none"


class Difference(FrozenModel):
    """`what` was `then` in the first run, and is `now`."""

    what: str
    then: str
    now: str


def environment_differences(
    then: Environment, then_on: Machine | None, now: Environment, now_on: Machine | None, *, threads: bool = True
) -> tuple[Difference, ...]:
    """Return the differences between two runs' code and machines.

    If `threads` is false, the number of threads is not compared: before a replay starts, since it uses the first run's
    number.
    """
    first, second = describe_environment(then, then_on), describe_environment(now, now_on)
    names = [*first, *(name for name in second if name not in first)]
    missing = [NOT_RECORDED if machine is None else NONE for machine in (then_on, now_on)]
    pairs = ((name, first.get(name, missing[0]), second.get(name, missing[1])) for name in names)
    return tuple(
        Difference(what=name, then=before, now=after)
        for name, before, after in pairs
        if before != after and (threads or name != "threads")
    )


def process_differences(then: str, now: str) -> tuple[Difference, ...]:
    """Return a difference if other numbers of processes trained the run (see `FinishedRun.processes`)."""
    return (Difference(what="processes", then=then, now=now),) if then != now else ()


def describe_environment(code: Environment, machine: Machine | None) -> dict[str, str]:
    """Return everything that is compared, by its display name."""
    found = {
        "git commit": code.git_commit,
        "uncommitted changes": f"yes, SHA-256 {code.git_diff_sha256[:12]}" if code.git_dirty else "no",
        "requirements.lock": f"SHA-256 {code.lock_sha256[:12]}" if code.lock_sha256 != NONE else NONE,
        "Python": machine.python if machine else code.python,
    }
    if machine is None:
        return found
    return {
        **found,
        **machine.packages,
        "processor": machine.processor,
        "GPUs": ", ".join(machine.gpus) or NONE,
        "threads": str(machine.threads),
    }
