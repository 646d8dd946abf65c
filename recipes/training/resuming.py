"""Where a run goes on: from its newest checkpoint, from its best, or from a step (`CheckpointPolicy.resume_from`), or from
one that its user sent it back to. What several nodes make of that: `recipes.training.checkpointing.resume`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import JsonValue
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from recipes.checkpoints.manager import Checkpoints
from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.rewind import SentBack, way_from
from recipes.runner import say
from recipes.storage.artifact_store import MANIFEST
from recipes.storage.manifest import Manifest
from recipes.training.data.sample_order import SAMPLES_SEEN
from recipes.training.metrics.validation_loss import owed

MADE_WITH = "made_with"
"""The fact in a checkpoint's manifest: what its weights and its optimizer's state are made for, of what the recipe says."""
COMPILED = "compiled"
"""The fact in a checkpoint's manifest: that blocks were compiled, which round otherwise; not there where they were not."""


def where_to_resume(
    checkpoints: Checkpoints, resume_from: Literal["latest", "best"] | int, sent_back: Sequence[SentBack] = ()
) -> tuple[Checkpoints, tuple[int, Path] | None]:
    """Where the run writes its checkpoints, and the one that it goes on from; None at the beginning.

    Going back loses nothing: what follows is written below `from-STEP`, and the checkpoints of the first time stay. Killed
    on its new way, the run goes on there, and does not go back once more.

    Raises:
        BadConfiguration: there is no valid checkpoint of that step.
    """
    ways = [checkpoints]
    start = None
    if resume_from != "latest":
        start = checkpoints.best() if resume_from == "best" else newest_of([checkpoints], resume_from)
        begun_at = start[0] if start else 0
        ways.append(checkpoints.below(way_from(begun_at), begun_at))
    for back in sent_back:
        ways.append(ways[-1].below(way_from(back.step), back.step))
    *before, way = ways
    if (newest := way.latest()) or not sent_back:
        return way, newest or start
    return way, newest_of(before, sent_back[-1].step)


def newest_of(ways: Sequence[Checkpoints], step: int) -> tuple[int, Path]:
    """The checkpoint of `step`, of the last way that has one. Raises BadConfiguration: none has."""
    for way in reversed(ways):
        if found := way.at(step):
            return found
    known = sorted({known for way in ways for known in (*way.local_steps(), *way.stored_steps())})
    there = ", ".join(map(str, known)) or "none"
    raise BadConfiguration(f"checkpoint.resume_from: there is no valid checkpoint {step}. There are: {there}")


def made_with(recipe: Recipe) -> dict[str, JsonValue]:
    """In the words of the recipe. Targets have no order."""
    stated = recipe.model_dump(mode="json", include={"method", "lora_rank", "lora_alpha", "optimizer"})
    targets: list[JsonValue] = [*sorted(recipe.lora_target_modules)]
    return {"base_model": recipe.base_model.sha256, **stated, "lora_target_modules": targets}


def check_fits(resume: tuple[int, Path], recipe: Recipe) -> None:
    """A run keeps the recipe that it was started with, as its record has it; but that may be lost, or a job written by hand.

    Raises:
        BadConfiguration: the checkpoint was made with another one, or the run takes other samples for a step now.
    """
    step, folder = resume
    facts = Manifest.model_validate_json((folder / MANIFEST).read_bytes()).facts
    then, now = facts.get(MADE_WITH), made_with(recipe)
    if isinstance(then, dict) and then != now:  # those from before it was written down do not say
        differing = ", ".join(f"{key} was {then.get(key)} and is {now[key]}" for key in now if then.get(key) != now[key])
        raise BadConfiguration(
            f"checkpoint {step} does not fit the recipe: {differing}: go on with the recipe as it was, or submit a new job"
        )
    seen, wanted = facts[SAMPLES_SEEN], step * recipe.samples_per_step
    if seen != wanted:
        raise BadConfiguration(
            f"checkpoint {step} has seen {seen} of the samples, and with this recipe it would have seen {wanted}: keep "
            "batch_size x gradient_accumulation x processes as it was"
        )


def tell_other_rounding(resume: tuple[int, Path], compiled: bool) -> None:
    """Say so where a run goes on otherwise than bit for bit: on a machine that lacks a compiler, or that has one again."""
    step, folder = resume
    then = bool(Manifest.model_validate_json((folder / MANIFEST).read_bytes()).facts.get(COMPILED))
    if then != compiled:
        were, are = ("were", "are not") if then else ("were not", "are")
        say(f"blocks {were} compiled for checkpoint {step}, and {are} here: the run goes on, with other roundings")


def is_over(state: TrainerState, recipe: Recipe) -> bool:
    """Whether a run has done its last step, and the evaluation after it."""
    return state.global_step >= recipe.max_steps and not _owes(state, recipe)


def owes_evaluation(checkpoint: Path, recipe: Recipe) -> bool:
    """Whether the run was asked to stop while it evaluated the weights of that checkpoint."""
    return _owes(TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)), recipe)


def _owes(state: TrainerState, recipe: Recipe) -> bool:
    return owed(state.global_step, recipe.eval_steps, recipe.max_steps, state.log_history)
