"""What went wrong in a run and was healed, as one small document beside its checkpoints; no torch in here.

It is both: what a restarted program must know (with which micro-batch, without which samples), and what the control plane
tells people. Written before the program ends for it, so that no kill loses it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.recipe import Recipe
from recipes.storage.artifact_store import Store

RECOVERY_FILE = "incidents.json"
MAX_PER_KIND = 3
"""How often each kind is healed in one run."""


def describe_step(step: int | None) -> str:
    return f"step {step}" if step else "a step"


class OutOfMemory(FrozenModel):
    """A step did not fit into memory; from here on the run takes this micro-batch and accumulation."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    step: int | None = Field(description="the step that did not fit; the kernel, which ends programs, says none")
    batch_size: int
    gradient_accumulation: int
    after: int | None = Field(
        None, description="the last step with the micro-batch from before that the final weights come from; known later"
    )

    @property
    def message(self) -> str:
        return (
            f"{describe_step(self.step)} did not fit into memory: on with batch_size {self.batch_size} and "
            "gradient_accumulation "
            f"{self.gradient_accumulation}, which is the same effective batch"
        )


class Diverged(FrozenModel):
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
    def message(self) -> str:
        if self.skipped:
            start = f"checkpoint {self.rolled_back_to}" if self.rolled_back_to else "the beginning"
            return f"diverged: {self.reason}; on from {start} without samples {self.skipped[0]} to {self.skipped[1] - 1}"
        if self.rolled_back_to:
            return f"diverged: {self.reason}; stopped, and back to checkpoint {self.rolled_back_to}"
        return f"diverged: {self.reason}; stopped, and no checkpoint is from before: try a lower learning_rate"


class NotDeterministic(FrozenModel):
    """An operation has no form on this GPU that computes the same each time; from here on the run takes what there is."""

    kind: Literal["not_deterministic"] = "not_deterministic"
    step: int = Field(description="the step that came to it")
    operation: str

    @property
    def message(self) -> str:
        return (
            f"{describe_step(self.step)} came to {self.operation}, which has no form that computes the same each "
            "time: on with "
            "what there is, so that the run's last digits may differ where it is resumed or repeated"
        )


class NotCompiled(FrozenModel):
    """A compiler of this machine cannot do a block of the model; from here on the run computes without compiled blocks."""

    kind: Literal["not_compiled"] = "not_compiled"
    step: int = Field(description="the step that came to it")
    reason: str

    @property
    def message(self) -> str:
        return (
            f"{describe_step(self.step)} came to a block that cannot be compiled here ({self.reason}): on "
            "without, which takes "
            "longer, and rounds otherwise"
        )


RecoveryEvent = Annotated[OutOfMemory | Diverged | NotDeterministic | NotCompiled, Field(discriminator="kind")]


class RecoveryLog(FrozenModel):
    """All of a run, oldest first."""

    entries: tuple[RecoveryEvent, ...] = ()

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
    def repeated_steps(self) -> tuple[tuple[range, int | None], ...]:
        """Steps that were trained on other samples after a divergence than before, with when that was."""
        return tuple((range(entry.step - 1, entry.noticed + 1), entry.at) for entry in self.diverged if entry.skipped)

    def resume_after(self, step: int) -> "RecoveryLog":
        """Of a run that goes on after `step` with what they say; it may have gone back behind where one began to hold."""
        entries = (
            entry.model_copy(update={"after": step})
            if isinstance(entry, OutOfMemory) and (entry.after is None or entry.after > step)
            else entry
            for entry in self.entries
        )
        return RecoveryLog(entries=tuple(entries))

    def with_event(self, incident: RecoveryEvent) -> "RecoveryLog":
        return self if incident in self.entries else RecoveryLog(entries=(*self.entries, incident))

    def without(self, earlier: Collection[RecoveryEvent]) -> "RecoveryLog":
        return RecoveryLog(entries=tuple(entry for entry in self.entries if entry not in earlier))

    def replay_events(self, earlier: Sequence[RecoveryEvent], step: int) -> "RecoveryLog":
        """Of a run that goes on after `step`, and repeats what is left of another one, which was healed of `earlier`.

        Samples are left out from the beginning on: of the steps that came to them, or behind them, none was left. A
        micro-batch gets smaller where it did then. Whether its GPU has a form of an operation, and its compiler one of a
        block, the run finds out itself.
        """
        earlier = [entry for entry in earlier if not isinstance(entry, NotDeterministic | NotCompiled)]
        kept = (
            entry
            for entry in earlier
            if (isinstance(entry, Diverged) and entry.skipped)
            or (isinstance(entry, OutOfMemory) and entry.after is not None and entry.after <= step)
        )
        return RecoveryLog(entries=(*kept, *self.without(earlier).entries))

    def shrink_recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with the micro-batch that fits into memory, as far as the run has found out.

        Its effective batch stays, also where the run goes on with another number of processes than it was found out with.
        """
        sizes = [entry.batch_size for entry in self.out_of_memory]
        return recipe.with_max_batch_size(min(sizes)) if sizes else recipe


def find_final_divergences(incidents: Iterable[RecoveryEvent]) -> list[Diverged]:
    """The divergences after which a run did not go on."""
    return [entry for entry in incidents if isinstance(entry, Diverged) and not entry.skipped]


def read_recovery_log(store: Store, checkpoints: str) -> RecoveryLog:
    """Of the run whose checkpoints lie at that logical URI."""
    try:
        return RecoveryLog.model_validate_json(store.get_bytes(f"{checkpoints}/{RECOVERY_FILE}"))
    except FileNotFoundError:
        return RecoveryLog()


def add_recovery_event(store: Store, checkpoints: str, incident: RecoveryEvent) -> RecoveryLog:
    """Add one. What a killed program had written already, and its successor runs into again, counts once."""
    known = read_recovery_log(store, checkpoints)
    grown = known.with_event(incident)
    if grown != known:
        write_recovery_log(store, checkpoints, grown)
    return grown


def write_recovery_log(store: Store, checkpoints: str, incidents: RecoveryLog) -> None:
    store.put_bytes(f"{checkpoints}/{RECOVERY_FILE}", incidents.model_dump_json(indent=1).encode())
