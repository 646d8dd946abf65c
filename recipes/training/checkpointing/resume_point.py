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

# Where a run goes on: from its newest checkpoint, from its best, or from a step (`CheckpointPolicy.resume_from`), or from
# one that its user sent it back to. Several nodes agree on one in `agree_on_checkpoint`.

MADE_WITH_FACT = "made_with"
"""The fact in a checkpoint's manifest: what its weights and its optimizer's state are made for, of what the recipe says."""
COMPILED_FACT = "compiled"
"""The fact in a checkpoint's manifest: that blocks were compiled, which round otherwise; not there where they were not."""


def find_resume_checkpoint(
    checkpoints: CheckpointManager, resume_from: Literal["latest", "best"] | int, sent_back: Sequence[Rewind] = ()
) -> tuple[CheckpointManager, tuple[int, Path] | None]:
    """Where the run writes its checkpoints, and the one that it goes on from; None at the beginning.

    Going back loses nothing: what follows is written below `from-STEP`, and the checkpoints of the first time stay. Killed
    on its new way, the run goes on there, and does not go back once more.

    Raises:
        BadConfiguration: there is no valid checkpoint of that step, or of those there are none was evaluated.
        Restart: none was found to go on from, and there are some.
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
    """Never start again at step 0 while a complete checkpoint exists: look for one once more, and end with an error.

    Raises:
        BadConfiguration: the best is asked for, and none was evaluated.
        Restart: a store that did not list them before does so now; another start may find them.
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
    """Of the checkpoints here and in the store, without what is one machine's part of one."""
    local = [step for step in checkpoints.local_steps() if part_in_folder(checkpoints.folder / str(step)) is None]
    return [*local, *checkpoints.stored_steps()]


def find_checkpoint(branches: Sequence[CheckpointManager], step: int) -> tuple[int, Path]:
    """The checkpoint of `step`, of the last way that has one. Raises BadConfiguration: none has."""
    for branch in reversed(branches):
        if found := branch.find_step(step):
            return found
    known = sorted({known for branch in branches for known in (*branch.local_steps(), *branch.stored_steps())})
    there = ", ".join(map(str, known)) or "none"
    raise BadConfiguration(f"checkpoint.resume_from: there is no valid checkpoint {step}. There are: {there}")


def describe_recipe(recipe: Recipe) -> dict[str, JsonValue]:
    """In the words of the recipe. Targets have no order."""
    stated = recipe.model_dump(mode="json", include={"method", "lora_rank", "lora_alpha", "optimizer"})
    targets: list[JsonValue] = [*sorted(recipe.lora_target_modules)]
    return {"base_model": recipe.base_model.sha256, **stated, "lora_target_modules": targets}


def check_checkpoint_fits(resume: tuple[int, Path], recipe: Recipe) -> None:
    """A run keeps the recipe that it was started with, as its record has it; but that may be lost, or a job written by hand.

    Raises:
        BadConfiguration: the checkpoint was made with another one, or the run takes other samples for a step now.
    """
    step, folder = resume
    facts = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes()).facts
    stored, now = facts.get(MADE_WITH_FACT), describe_recipe(recipe)
    if isinstance(stored, dict) and stored != now:  # those from before it was written down do not say
        differing = ", ".join(f"{key} was {stored.get(key)} and is {now[key]}" for key in now if stored.get(key) != now[key])
        raise BadConfiguration(
            f"checkpoint {step} does not fit the recipe: {differing}: go on with the recipe as it was, or submit a new job"
        )
    seen, wanted = facts[SAMPLES_SEEN], step * recipe.samples_per_step
    if seen != wanted:
        raise BadConfiguration(
            f"checkpoint {step} has seen {seen} of the samples, and with this recipe it would have seen {wanted}: keep "
            "batch_size x gradient_accumulation x processes as it was"
        )


def warn_compilation_changed(resume: tuple[int, Path], compiled: bool) -> None:
    """Say so where a run goes on otherwise than bit for bit: on a machine that lacks a compiler, or that has one again."""
    step, folder = resume
    stored = bool(Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes()).facts.get(COMPILED_FACT))
    if stored != compiled:
        then_text, now_text = ("were", "are not") if stored else ("were not", "are")
        log_line(
            f"blocks {then_text} compiled for checkpoint {step}, and {now_text} here: the run goes on, with other roundings"
        )


def is_finished(state: TrainerState, recipe: Recipe) -> bool:
    """Whether a run has done its last step, and the evaluation after it."""
    return state.global_step >= recipe.max_steps and not _needs_evaluation(state, recipe)


def needs_evaluation(checkpoint: Path, recipe: Recipe) -> bool:
    """Whether the run was asked to stop while it evaluated the weights of that checkpoint."""
    return _needs_evaluation(TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)), recipe)


def _needs_evaluation(state: TrainerState, recipe: Recipe) -> bool:
    return is_evaluation_due(state.global_step, recipe.eval_steps, recipe.max_steps, state.log_history)


# One checkpoint that all processes of a run go on from, whatever each machine has in its folder.
#
# Where folders outlive a restart, the leader's newest may have been on its way to the store as all were killed, and
# others have none of it: they trained on from different checkpoints, until one waited for the other.

FoundCheckpoint = tuple[int, Path]


@dataclass(frozen=True)
class ResumePlan:
    """Where the leader goes on, in terms that hold on every machine.

    `branch_steps` are the steps at which the run left one way for the next. After the first `num_branches_before` of them
    lies the checkpoint of `step`, with that `content`; none at the beginning.
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
    """`find_resume_checkpoint` as the leader sees it, for all processes at once.

    What lies in parts on their machines is made whole before. One process of each node looks for itself while the leader
    does, and nearly always has the same by then: it is the one that fetches.

    Raises:
        BadConfiguration: there is no valid checkpoint of the step to resume from.
        Restart: the store has not what the leader goes on from, or the leader found none although there are some.
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
        with suppress(BadConfiguration):  # what is not here may be with the leader
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
    """Of a run whose first way is `checkpoints`."""
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
    """The way that a run is on after it left those before at these steps."""
    return reduce(lambda branch, step: branch.branch(rewind_folder(step), step), branch_steps, checkpoints)
