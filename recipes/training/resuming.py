"""Where a run goes on: from its newest checkpoint, from its best, or from a step (`CheckpointPolicy.resume_from`)."""

from pathlib import Path
from typing import Literal

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from recipes.checkpoints import Checkpoints
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration, Manifest
from recipes.store import MANIFEST
from recipes.training.held_out import owed
from recipes.training.samples import SAMPLES_SEEN, SamplesOfRun


def where_to_resume(
    checkpoints: Checkpoints, resume_from: Literal["latest", "best"] | int
) -> tuple[Checkpoints, tuple[int, Path] | None]:
    """Where the run writes its checkpoints, and the one that it goes on from; None at the beginning.

    Going back loses nothing: what follows is written below `from-STEP`, and the checkpoints of the first time stay. Killed
    on its new way, the run goes on there, and does not go back once more.

    Raises:
        BadConfiguration: there is no valid checkpoint of that step.
    """
    if resume_from == "latest":
        return checkpoints, checkpoints.latest()
    start = checkpoints.best() if resume_from == "best" else checkpoints.at(resume_from)
    if start is None and resume_from != "best":
        known = sorted({*checkpoints.local_steps(), *checkpoints.stored_steps()})
        there = ", ".join(map(str, known)) or "none"
        raise BadConfiguration(f"checkpoint.resume_from: there is no valid checkpoint {resume_from}. There are: {there}")
    way = checkpoints.below(f"from-{start[0] if start else 0}")
    return way, way.latest() or start


def check_position(resume: tuple[int, Path], samples: SamplesOfRun) -> None:
    """Raises BadConfiguration where the run now takes other samples for a step than when the checkpoint was made."""
    step, folder = resume
    seen = Manifest.model_validate_json((folder / MANIFEST).read_bytes()).facts[SAMPLES_SEEN]
    if seen != samples.seen(step):
        raise BadConfiguration(
            f"checkpoint {step} has seen {seen} samples, {step} steps of this recipe see {samples.seen(step)}: keep "
            "batch_size x gradient_accumulation x processes as it was"
        )


def is_over(state: TrainerState, recipe: Recipe) -> bool:
    """Whether a run has done its last step, and the evaluation after it."""
    return state.global_step >= recipe.max_steps and not owed(state.global_step, recipe.eval_steps, state.log_history)


def owes_evaluation(checkpoint: Path, recipe: Recipe) -> bool:
    """Whether the run was asked to stop while it evaluated the weights of that checkpoint."""
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    return owed(state.global_step, recipe.eval_steps, state.log_history)
