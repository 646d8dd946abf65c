"""In what two environments differ, as far as it may change the last bits of a number. Pure."""

from recipes.contracts.frozen_model import Frozen
from recipes.contracts.job import Machine
from resources.lineage.run_record import Environment

UNKNOWN = "not recorded"
NONE = "none"


class Difference(Frozen):
    """`what` was `then`, when the first run was made, and is `now`."""

    what: str
    then: str
    now: str


def differences(
    then: Environment, then_on: Machine | None, now: Environment, now_on: Machine | None, *, threads: bool = True
) -> tuple[Difference, ...]:
    """What differs between two runs' code and machines.

    `threads` says whether theirs count: before a replay starts they do not, since it is given the first run's.
    """
    first, second = described(then, then_on), described(now, now_on)
    names = [*first, *(name for name in second if name not in first)]
    missing = [UNKNOWN if machine is None else NONE for machine in (then_on, now_on)]
    pairs = ((name, first.get(name, missing[0]), second.get(name, missing[1])) for name in names)
    return tuple(
        Difference(what=name, then=before, now=after)
        for name, before, after in pairs
        if before != after and (threads or name != "threads")
    )


def of_processes(then: str, now: str) -> tuple[Difference, ...]:
    """That a run was trained by other numbers of processes, as `FinishedRun.processes` says them."""
    return (Difference(what="processes", then=then, now=now),) if then != now else ()


def described(code: Environment, machine: Machine | None) -> dict[str, str]:
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
