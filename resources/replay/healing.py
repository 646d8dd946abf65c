"""What one of two runs was healed of and the other was not: from there on it took other micro-batches or samples. Pure."""

from collections.abc import Sequence
from typing import Literal

from recipes.contracts.frozen_model import Frozen
from recipes.contracts.recovery_log import Incident


class Unrepeated(Frozen):
    """An incident of the run `of`. `step` is null where the kernel ended the program, which says none."""

    of: Literal["run", "replay"]
    kind: Literal["out_of_memory", "diverged", "not_deterministic", "not_compiled"]
    step: int | None
    what: str


def unrepeated(then: Sequence[Incident], now: Sequence[Incident]) -> tuple[Unrepeated, ...]:
    """Incidents of the first run that its replay does not have, then those that it has alone.

    A replay takes the smaller micro-batches of the first run where that took them, and leaves out the samples that it left
    out, so that it does not come to those divergences; it may run out of memory earlier, or once more.
    """
    return (
        *(told("run", incident) for incident in then if incident not in now),
        *(told("replay", incident) for incident in now if incident not in then),
    )


def told(of: Literal["run", "replay"], incident: Incident) -> Unrepeated:
    return Unrepeated(of=of, kind=incident.kind, step=incident.step, what=incident.words)
