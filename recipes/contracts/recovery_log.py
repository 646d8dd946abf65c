"""The recovery log of a run: a small document next to its checkpoints.

Free of torch. It records how a restarted program must continue (with which micro-batch, without which samples), and what
users are shown. An event is written before the program exits because of it, so that a kill cannot lose it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.recipe import Recipe
from recipes.storage.artifact_store import Store

RECOVERY_FILE = "incidents.json"
MAX_PER_KIND = 3
"""Maximum recoveries of each kind per run."""


def describe_step(step: int | None) -> str:
    return f"step {step}" if step else "a step"


class OutOfMemory(FrozenModel):
    """A step did not fit into memory; the run continues with this micro-batch and accumulation."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    step: int | None = Field(description="the step that did not fit; unknown if the kernel killed the program")
    batch_size: int
    gradient_accumulation: int
    after: int | None = Field(
        None, description="last step with the previous micro-batch that contributed to the final weights; set later"
    )

    @property
    def message(self) -> str:
        return (
            f"{describe_step(self.step)} did not fit into memory: continuing with batch_size {self.batch_size} and "
            f"gradient_accumulation {self.gradient_accumulation}, which is the same effective batch"
        )


class Diverged(FrozenModel):
    """The loss left its band.

    `skipped` is a half-open range of positions in the order of samples.
    """

    kind: Literal["diverged"] = "diverged"
    step: int = Field(description="the first step with a bad loss")
    noticed: int = Field(description="the step at which the divergence was certain")
    reason: str
    way: str = Field(
        ".",
        description="branch of the run's checkpoints at that time; each rewind starts a new one",
        exclude_if=lambda value: value == ".",
    )
    rolled_back_to: int | None = Field(description="step of the last good checkpoint, if any")
    skipped: tuple[int, int] | None = None
    at: int | None = Field(
        None,
        description="time in ms since 1970; values of its steps logged later belong to other samples",
        exclude_if=lambda value: value is None,
    )

    @property
    def message(self) -> str:
        if self.skipped:
            start = f"checkpoint {self.rolled_back_to}" if self.rolled_back_to else "the beginning"
            return (
                f"diverged: {self.reason}; continuing from {start} "
                f"without samples {self.skipped[0]} to {self.skipped[1] - 1}"
            )
        if self.rolled_back_to:
            return f"diverged: {self.reason}; stopped and rolled back to checkpoint {self.rolled_back_to}"
        return f"diverged: {self.reason}; stopped, and there is no earlier checkpoint: try a lower learning_rate"


class NotDeterministic(FrozenModel):
    """An operation has no deterministic kernel on this GPU.

    The run continues with the available one.
    """

    kind: Literal["not_deterministic"] = "not_deterministic"
    step: int = Field(description="the step that used the operation")
    operation: str

    @property
    def message(self) -> str:
        return (
            f"{describe_step(self.step)} used {self.operation}, which has no deterministic kernel: continuing with the one "
            "available, so the run's last digits may differ when it is resumed or repeated"
        )


class NotCompiled(FrozenModel):
    """A block of the model cannot be compiled on this machine.

    The run continues without compilation.
    """

    kind: Literal["not_compiled"] = "not_compiled"
    step: int = Field(description="the step that compiled the block")
    reason: str

    @property
    def message(self) -> str:
        return (
            f"{describe_step(self.step)} used a block that cannot be compiled on this machine ({self.reason}): continuing "
            "without compilation, which is slower and rounds differently"
        )


RecoveryEvent = Annotated[OutOfMemory | Diverged | NotDeterministic | NotCompiled, Field(discriminator="kind")]


class RecoveryLog(FrozenModel):
    """All recovery events of a run, oldest first."""

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
        """Position ranges of skipped samples."""
        return tuple(entry.skipped for entry in self.diverged if entry.skipped)

    @property
    def repeated_steps(self) -> tuple[tuple[range, int | None], ...]:
        """Steps repeated with other samples after a divergence, with the time of each."""
        return tuple((range(entry.step - 1, entry.noticed + 1), entry.at) for entry in self.diverged if entry.skipped)

    def resume_after(self, step: int) -> "RecoveryLog":
        """Return the log of a run that resumes after `step`.

        It may have rewound to before an event took effect.
        """
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
        """Return the log of a replay that resumes after `step`.

        Samples are skipped from the start: no step that used them, or any later one, is part of the original's final
        weights. Micro-batches shrink where they did originally. Each run detects missing kernels and compile failures
        itself.
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
        """Return the recipe with the micro-batch that the log shows to fit into memory.

        The effective batch stays the same, even if the run resumes with another number of processes.
        """
        sizes = [entry.batch_size for entry in self.out_of_memory]
        return recipe.with_max_batch_size(min(sizes)) if sizes else recipe


def find_final_divergences(incidents: Iterable[RecoveryEvent]) -> list[Diverged]:
    """Return the divergences that ended a run."""
    return [entry for entry in incidents if isinstance(entry, Diverged) and not entry.skipped]


def read_recovery_log(store: Store, checkpoints: str) -> RecoveryLog:
    """Read the recovery log of the run with these checkpoints (a logical URI)."""
    try:
        return RecoveryLog.model_validate_json(store.get_bytes(f"{checkpoints}/{RECOVERY_FILE}"))
    except FileNotFoundError:
        return RecoveryLog()


def add_recovery_event(store: Store, checkpoints: str, incident: RecoveryEvent) -> RecoveryLog:
    """Add an event once.

    A killed program may have written it already, and its successor meets it again.
    """
    known = read_recovery_log(store, checkpoints)
    grown = known.with_event(incident)
    if grown != known:
        write_recovery_log(store, checkpoints, grown)
    return grown


def write_recovery_log(store: Store, checkpoints: str, incidents: RecoveryLog) -> None:
    store.put_bytes(f"{checkpoints}/{RECOVERY_FILE}", incidents.model_dump_json(indent=1).encode())
