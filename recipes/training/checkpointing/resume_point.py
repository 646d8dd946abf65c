"""Choose the checkpoint that a run resumes from, the same on all nodes."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

from pydantic import JsonValue
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from recipes.checkpoints.commit import read_content_digest
from recipes.checkpoints.local import keep_only_step
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import part_in_folder
from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.rewind import Rewind, rewind_folder
from recipes.runner import Restart, log_line
from recipes.storage.artifact_store import MANIFEST_FILE
from recipes.storage.manifest import Manifest
from recipes.training.checkpointing.checkpoint_assembly import assemble_checkpoints
from recipes.training.data.sample_order import SAMPLES_SEEN
from recipes.training.metrics.validation_loss import is_evaluation_due
from recipes.training.parallel.process_group import ProcessGroup

# A run resumes from its newest checkpoint, its best, a given step (`CheckpointPolicy.resume_from`), or the step its user
# rewound it to. Several nodes agree on one checkpoint in `agree_on_checkpoint`.

MADE_WITH_FACT = "made_with"
"""Manifest fact of a checkpoint: the recipe values that its weights and optimizer state depend on."""
COMPILED_FACT = "compiled"
"""Manifest fact of a checkpoint: blocks were compiled, which rounds differently; absent where they were not."""


def find_resume_checkpoint(
    checkpoints: CheckpointManager, resume_from: Literal["latest", "best"] | int, sent_back: Sequence[Rewind] = ()
) -> tuple[CheckpointManager, tuple[int, Path] | None]:
    """Return the run's current branch and the checkpoint to resume from, if any.

    A rewind deletes nothing: later checkpoints are written below `from-STEP`, and the earlier ones stay. A run that is
    killed on its new branch resumes there and does not rewind again.

    Raises:
        BadConfiguration: no valid checkpoint of that step exists, or none of the checkpoints was evaluated.
        Restart: no checkpoint was found, although complete ones exist.
    """
    branches = [checkpoints]
    start = None
    if resume_from != "latest":
        start = checkpoints.best() if resume_from == "best" else find_checkpoint([checkpoints], resume_from)
        begun_at = start[0] if start else 0
        branches.append(checkpoints.branch(rewind_folder(begun_at), begun_at))
    for back in sent_back:
        branches.append(branches[-1].branch(rewind_folder(back.step), back.step))
    *before, branch = branches
    if (newest := branch.latest()) or not sent_back:
        if newest is None and start is None:
            refuse_to_begin_again(branches, resume_from)
        return branch, newest or start
    return branch, find_checkpoint(before, sent_back[-1].step)


def refuse_to_begin_again(branches: Sequence[CheckpointManager], resume_from: Literal["latest", "best"] | int) -> None:
    """Raise if a complete checkpoint exists: a run must never restart at step 0 silently.

    Raises:
        BadConfiguration: the best checkpoint is requested, and none was evaluated.
        Restart: the store did not list the checkpoints before and does now; the next start may find them.
    """
    complete = sorted({step for branch in branches for step in list_complete_steps(branch)})
    if not complete:
        return
    there = ", ".join(map(str, complete))
    if resume_from == "best":
        raise BadConfiguration(
            f"checkpoint.resume_from is best, and no checkpoint was evaluated. There are: {there}: "
            "set it to latest, or to one of these steps"
        )
    raise Restart(f"the run would begin at step 0, although there are complete checkpoints in {branches[-1].uri}: {there}")


def list_complete_steps(checkpoints: CheckpointManager) -> list[int]:
    """List steps that are complete on this machine or in the store.

    A node's part alone does not count.
    """
    local = [step for step in checkpoints.local_steps() if part_in_folder(checkpoints.folder / str(step)) is None]
    return [*local, *checkpoints.stored_steps()]


def find_checkpoint(branches: Sequence[CheckpointManager], step: int) -> tuple[int, Path]:
    """Return the checkpoint of `step` on the last branch that has one.

    Raises:
        BadConfiguration: no branch has one.
    """
    for branch in reversed(branches):
        if found := branch.find_step(step):
            return found
    known = sorted({known for branch in branches for known in (*branch.local_steps(), *branch.stored_steps())})
    there = ", ".join(map(str, known)) or "none"
    raise BadConfiguration(f"checkpoint.resume_from: there is no valid checkpoint {step}. There are: {there}")


def describe_recipe(recipe: Recipe) -> dict[str, JsonValue]:
    """Return the recipe values that a checkpoint depends on.

    LoRA targets sorted, as their order is irrelevant.
    """
    stated = recipe.model_dump(mode="json", include={"method", "lora_rank", "lora_alpha", "optimizer"})
    targets: list[JsonValue] = [*sorted(recipe.lora_target_modules)]
    return {"base_model": recipe.base_model.sha256, **stated, "lora_target_modules": targets}


def check_checkpoint_fits(resume: tuple[int, Path], recipe: Recipe) -> None:
    """Check that a checkpoint fits the recipe.

    A run keeps its recipe, but the recorded recipe may be lost, or the job may be written by hand.

    Raises:
        BadConfiguration: the checkpoint was made with another recipe, or the number of samples per step has changed.
    """
    step, folder = resume
    facts = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes()).facts
    stored, now = facts.get(MADE_WITH_FACT), describe_recipe(recipe)
    if isinstance(stored, dict) and stored != now:  # earlier versions did not record it
        differing = ", ".join(f"{key} was {stored.get(key)} and is {now[key]}" for key in now if stored.get(key) != now[key])
        raise BadConfiguration(
            f"checkpoint {step} does not fit the recipe: {differing}: restore these values, or submit a new job"
        )
    seen, wanted = facts[SAMPLES_SEEN], step * recipe.samples_per_step
    if seen != wanted:
        raise BadConfiguration(
            f"checkpoint {step} has seen {seen} of the samples, and with this recipe it would have seen {wanted}: keep "
            "batch_size x gradient_accumulation x processes as it was"
        )


def warn_compilation_changed(resume: tuple[int, Path], compiled: bool) -> None:
    """Log if compilation was available before the resume but is not now, or vice versa.

    Compiled blocks round differently, so the run is not bit-exact.
    """
    step, folder = resume
    stored = bool(Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes()).facts.get(COMPILED_FACT))
    if stored != compiled:
        then_text, now_text = ("were", "are not") if stored else ("were not", "are")
        log_line(f"blocks {then_text} compiled for checkpoint {step}, and {now_text} here: resuming with different rounding")


def is_finished(state: TrainerState, recipe: Recipe) -> bool:
    """Return whether the run has done its last step and the evaluation after it."""
    return state.global_step >= recipe.max_steps and not _needs_evaluation(state, recipe)


def needs_evaluation(checkpoint: Path, recipe: Recipe) -> bool:
    """Return whether the checkpoint's evaluation was aborted by a stop request."""
    return _needs_evaluation(TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)), recipe)


def _needs_evaluation(state: TrainerState, recipe: Recipe) -> bool:
    return is_evaluation_due(state.global_step, recipe.eval_steps, recipe.max_steps, state.log_history)


# All processes of a run resume from one checkpoint, whichever ones each machine has in its folder.
#
# Where folders outlive a restart, the leader's newest checkpoint may not have reached the store before all processes were
# killed. The nodes then trained from different checkpoints, until one waited forever for another.

FoundCheckpoint = tuple[int, Path]


@dataclass(frozen=True)
class ResumePlan:
    """The checkpoint that the leader resumes from, described independently of machines.

    Attributes:
        branch_steps: steps at which the run left one branch for the next.
        num_branches_before: number of these branches to follow to the checkpoint.
        step: the checkpoint's step; None at the start of a run.
        content: the checkpoint's content digest.
    """

    branch_steps: tuple[int, ...]
    num_branches_before: int = 0
    step: int | None = None
    content: str = ""


def agree_on_checkpoint(
    checkpoints: CheckpointManager,
    resume_from: Literal["latest", "best"] | int,
    sent_back: Sequence[Rewind],
    group: ProcessGroup,
) -> tuple[CheckpointManager, FoundCheckpoint | None]:
    """Run `find_resume_checkpoint` on the leader and make all processes use its result.

    Multi-node checkpoints are assembled first. One process of each other node searches on its own at the same time, fetches
    what it finds, and nearly always finds the same checkpoint.

    Raises:
        BadConfiguration: there is no valid checkpoint of the step to resume from.
        Restart: the store lacks the leader's checkpoint, or the leader found none although there are some.
    """
    asked = {back.step for back in sent_back} | ({resume_from} if isinstance(resume_from, int) else set())
    assemble_checkpoints(checkpoints, group, asked)
    seen: FoundCheckpoint | None = None
    place: ResumePlan | None = None
    if group.is_leader:
        branch, seen = find_resume_checkpoint(checkpoints, resume_from, sent_back)
        place = make_resume_plan(branch, seen, checkpoints)
        if place.step is not None and group.size > group.local_size:
            follow_branches(checkpoints, place.branch_steps[: place.num_branches_before]).ensure_uploaded(place.step)
    elif group.local_rank == 0:
        with suppress(BadConfiguration):  # a checkpoint that is missing here may be on the leader
            _, seen = find_resume_checkpoint(checkpoints, resume_from, sent_back)
    place = group.broadcast(place)
    assert place is not None
    branch = follow_branches(checkpoints, place.branch_steps)
    if place.step is None:
        if group.local_rank == 0 and not group.is_leader:
            keep_only_step(branch.folder, 0)
        return branch, None
    holder = follow_branches(checkpoints, place.branch_steps[: place.num_branches_before])
    found = place.step, holder.folder / str(place.step)
    if group.local_rank == 0 and not group.is_leader:
        if seen != found or read_content_digest(found[1]) != place.content:
            holder.ensure_local(place.step, place.content)
        keep_only_step(holder.folder, place.step)
    group.all_gather(None)
    return branch, found


def make_resume_plan(branch: CheckpointManager, found: FoundCheckpoint | None, checkpoints: CheckpointManager) -> ResumePlan:
    """Describe `found` and the chain of branches from the run's first one (`checkpoints`) to `branch`."""
    branch_steps: list[int] = []
    last = branch
    while last.origin:
        last, step = last.origin
        branch_steps.insert(0, step)
    if found is None:
        return ResumePlan(tuple(branch_steps))
    step, folder = found
    return ResumePlan(
        tuple(branch_steps), len(folder.relative_to(checkpoints.folder).parts) - 1, step, read_content_digest(folder)
    )


def follow_branches(checkpoints: CheckpointManager, branch_steps: Sequence[int]) -> CheckpointManager:
    """Return the branch reached by leaving a branch at each of these steps."""
    return reduce(lambda branch, step: branch.branch(rewind_folder(step), step), branch_steps, checkpoints)
