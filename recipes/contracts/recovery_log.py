"""What went wrong in a run and was healed, as one small document beside its checkpoints; no torch in here.

It is both: what a restarted program must know (with which micro-batch, without which samples), and what the control plane
tells people. Written before the program ends for it, so that no kill loses it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from recipes.contracts.frozen_model import Frozen
from recipes.contracts.recipe import Recipe
from recipes.storage.artifact_store import Store

NAME = "incidents.json"
MOST = 3
"""How often each kind is healed in one run."""


def words_of(step: int | None) -> str:
    return f"step {step}" if step else "a step"


class OutOfMemory(Frozen):
    """A step did not fit into memory; from here on the run takes this micro-batch and accumulation."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    step: int | None = Field(description="the step that did not fit; the kernel, which ends programs, says none")
    batch_size: int
    gradient_accumulation: int
    after: int | None = Field(
        None, description="the last step with the micro-batch from before that the final weights come from; known later"
    )

    @property
    def words(self) -> str:
        return (
            f"{words_of(self.step)} did not fit into memory: on with batch_size {self.batch_size} and gradient_accumulation "
            f"{self.gradient_accumulation}, which is the same effective batch"
        )


class Diverged(Frozen):
    """The loss left its band. `skipped` are positions in the order of the samples, the second not included."""

    kind: Literal["diverged"] = "diverged"
    step: int = Field(description="the first step with a bad loss")
    noticed: int = Field(description="the step at which it was certain")
    reason: str
    way: str = Field(
        ".",
        description="the folder of its checkpoints then, below those that it began with: another after it was sent back",
        exclude_if=lambda value: value == ".",
    )
    rolled_back_to: int | None = Field(description="step of the last good checkpoint; none where there was none")
    skipped: tuple[int, int] | None = None
    at: int | None = Field(
        None,
        description="when that was, in ms since 1970: what is logged of its steps later is of other samples",
        exclude_if=lambda value: value is None,
    )

    @property
    def words(self) -> str:
        if self.skipped:
            where = f"checkpoint {self.rolled_back_to}" if self.rolled_back_to else "the beginning"
            return f"diverged: {self.reason}; on from {where} without samples {self.skipped[0]} to {self.skipped[1] - 1}"
        if self.rolled_back_to:
            return f"diverged: {self.reason}; stopped, and back to checkpoint {self.rolled_back_to}"
        return f"diverged: {self.reason}; stopped, and no checkpoint is from before: try a lower learning_rate"


class NotDeterministic(Frozen):
    """An operation has no form on this GPU that computes the same each time; from here on the run takes what there is."""

    kind: Literal["not_deterministic"] = "not_deterministic"
    step: int = Field(description="the step that came to it")
    operation: str

    @property
    def words(self) -> str:
        return (
            f"{words_of(self.step)} came to {self.operation}, which has no form that computes the same each time: on with "
            "what there is, so that the run's last digits may differ where it is resumed or repeated"
        )


class NotCompiled(Frozen):
    """A compiler of this machine cannot do a block of the model; from here on the run computes without compiled blocks."""

    kind: Literal["not_compiled"] = "not_compiled"
    step: int = Field(description="the step that came to it")
    reason: str

    @property
    def words(self) -> str:
        return (
            f"{words_of(self.step)} came to a block that cannot be compiled here ({self.reason}): on without, which takes "
            "longer, and rounds otherwise"
        )


Incident = Annotated[OutOfMemory | Diverged | NotDeterministic | NotCompiled, Field(discriminator="kind")]


class Incidents(Frozen):
    """All of a run, oldest first."""

    entries: tuple[Incident, ...] = ()

    @property
    def out_of_memory(self) -> list[OutOfMemory]:
        return [entry for entry in self.entries if isinstance(entry, OutOfMemory)]

    @property
    def diverged(self) -> list[Diverged]:
        return [entry for entry in self.entries if isinstance(entry, Diverged)]

    @property
    def not_deterministic(self) -> list[NotDeterministic]:
        return [entry for entry in self.entries if isinstance(entry, NotDeterministic)]

    @property
    def not_compiled(self) -> list[NotCompiled]:
        return [entry for entry in self.entries if isinstance(entry, NotCompiled)]

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """Positions of samples that are left out."""
        return tuple(entry.skipped for entry in self.diverged if entry.skipped)

    @property
    def steps_done_anew(self) -> tuple[tuple[range, int | None], ...]:
        """Steps that were trained on other samples after a divergence than before, with when that was."""
        return tuple((range(entry.step - 1, entry.noticed + 1), entry.at) for entry in self.diverged if entry.skipped)

    def going_on(self, step: int) -> "Incidents":
        """Of a run that goes on after `step` with what they say; it may have gone back behind where one began to hold."""
        entries = (
            entry.model_copy(update={"after": step})
            if isinstance(entry, OutOfMemory) and (entry.after is None or entry.after > step)
            else entry
            for entry in self.entries
        )
        return Incidents(entries=tuple(entries))

    def grown(self, incident: Incident) -> "Incidents":
        return self if incident in self.entries else Incidents(entries=(*self.entries, incident))

    def without(self, others: Collection[Incident]) -> "Incidents":
        return Incidents(entries=tuple(entry for entry in self.entries if entry not in others))

    def repeating(self, others: Sequence[Incident], step: int) -> "Incidents":
        """Of a run that goes on after `step`, and repeats what is left of another one, which was healed of `others`.

        Samples are left out from the beginning on: of the steps that came to them, or behind them, none was left. A
        micro-batch gets smaller where it did then. Whether its GPU has a form of an operation, and its compiler one of a
        block, the run finds out itself.
        """
        others = [entry for entry in others if not isinstance(entry, NotDeterministic | NotCompiled)]
        hold = (
            entry
            for entry in others
            if (isinstance(entry, Diverged) and entry.skipped)
            or (isinstance(entry, OutOfMemory) and entry.after is not None and entry.after <= step)
        )
        return Incidents(entries=(*hold, *self.without(others).entries))

    def fitted(self, recipe: Recipe) -> Recipe:
        """The recipe with the micro-batch that fits into memory, as far as the run has found out.

        Its effective batch stays, also where the run goes on with another number of processes than it was found out with.
        """
        sizes = [entry.batch_size for entry in self.out_of_memory]
        return recipe.in_batches_of(min(sizes)) if sizes else recipe


def ends_of(incidents: Iterable[Incident]) -> list[Diverged]:
    """The divergences after which a run did not go on."""
    return [entry for entry in incidents if isinstance(entry, Diverged) and not entry.skipped]


def read_incidents(store: Store, checkpoints: str) -> Incidents:
    """Of the run whose checkpoints lie at that logical URI."""
    try:
        return Incidents.model_validate_json(store.get_bytes(f"{checkpoints}/{NAME}"))
    except FileNotFoundError:
        return Incidents()


def write_incident(store: Store, checkpoints: str, incident: Incident) -> Incidents:
    """Add one. What a killed program had written already, and its successor runs into again, counts once."""
    known = read_incidents(store, checkpoints)
    grown = known.grown(incident)
    if grown != known:
        put_incidents(store, checkpoints, grown)
    return grown


def put_incidents(store: Store, checkpoints: str, incidents: Incidents) -> None:
    store.put_bytes(f"{checkpoints}/{NAME}", incidents.model_dump_json(indent=1).encode())
