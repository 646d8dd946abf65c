"""Compare two runs: losses, weights, recoveries and environments. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import Machine
from recipes.contracts.recovery_log import RecoveryEvent
from resources.lineage.run_record import Environment

# Whether two runs came out the same: every step's loss, then the final weights' hash. Pure.

Loss = float | Literal["not finite", "missing"]


class StepDifference(FrozenModel):
    """The losses of the first step at which two runs part."""

    step: int
    then: Loss
    now: Loss


class FileDifference(FrozenModel):
    """SHA-256 of a file of weights in both runs; null where one does not have it."""

    path: str
    then: str | None
    now: str | None


class Comparison(FrozenModel):
    """`steps` counts the losses compared; `first_difference` and `weights` say where two runs part, if they do."""

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
    """Compare step -> loss, and path -> SHA-256.

    Equal means every bit. A loss that is not finite is NaN or None, and equals another one that is not.
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
    """A step's loss, so that `==` says what this file calls equal."""
    if step not in losses:
        return "missing"
    loss = losses[step]
    return loss if loss is not None and math.isfinite(loss) else "not finite"


# What one of two runs was healed of and the other was not: from there on it took other micro-batches or samples. Pure.


class Unrepeated(FrozenModel):
    """An incident of the run `of`. `step` is null where the kernel ended the program, which says none."""

    of: Literal["run", "replay"]
    kind: Literal["out_of_memory", "diverged", "not_deterministic", "not_compiled"]
    step: int | None
    what: str


def find_unrepeated(then: Sequence[RecoveryEvent], now: Sequence[RecoveryEvent]) -> tuple[Unrepeated, ...]:
    """Incidents of the first run that its replay does not have, then those that it has alone.

    A replay takes the smaller micro-batches of the first run where that took them, and leaves out the samples that it left
    out, so that it does not come to those divergences; it may run out of memory earlier, or once more.
    """
    return (
        *(describe_incident("run", incident) for incident in then if incident not in now),
        *(describe_incident("replay", incident) for incident in now if incident not in then),
    )


def describe_incident(of: Literal["run", "replay"], incident: RecoveryEvent) -> Unrepeated:
    return Unrepeated(of=of, kind=incident.kind, step=incident.step, what=incident.message)


# In what two environments differ, as far as it may change the last bits of a number. Pure.

NOT_RECORDED = "not recorded"
NONE = "none"


class Difference(FrozenModel):
    """`what` was `then`, when the first run was made, and is `now`."""

    what: str
    then: str
    now: str


def environment_differences(
    then: Environment, then_on: Machine | None, now: Environment, now_on: Machine | None, *, threads: bool = True
) -> tuple[Difference, ...]:
    """What differs between two runs' code and machines.

    `threads` says whether theirs count: before a replay starts they do not, since it is given the first run's.
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
    """That a run was trained by other numbers of processes, as `FinishedRun.processes` says them."""
    return (Difference(what="processes", then=then, now=now),) if then != now else ()


def describe_environment(code: Environment, machine: Machine | None) -> dict[str, str]:
    """Everything that is compared, by the name that people know it by."""
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
