"""Where a run stands as a process takes it up: with which recipe, among which processes, and after which checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from hanzo_ml.client.repeated_steps import Anew
from recipes.checkpoints.manager import Checkpoints
from recipes.checkpoints.shard_selection import Share
from recipes.contracts.job import Job
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import Incident, Incidents, read_incidents
from recipes.contracts.rewind import SentBack
from recipes.launch import fetches_share
from recipes.planning.recipe_checks import refuse_what_is_missing
from recipes.storage.artifact_store import Store
from recipes.training.checkpointing.resume import resume_together
from recipes.training.discarding import forget_spoilt
from recipes.training.machine import refuse_what_the_machine_lacks, tell_that_there_is_no_gpu
from recipes.training.parallel.process_group import Group, join
from recipes.training.parameters import TrainParameters
from recipes.training.precision import tell_fallback
from recipes.training.recovery import what_happened
from recipes.training.resuming import check_fits


@dataclass(frozen=True)
class Course:
    """`recipe` is that of the job, with as many processes as there are and the micro-batch that fits into memory.

    `uri` is where the run's checkpoints lie, `resume` the one to go on from, none at the beginning; `incidents` is what the
    run was healed of so far, and `repeats` what the one was that it repeats; `sent_back` is where its user sent it back to.
    """

    recipe: Recipe
    group: Group
    checkpoints: Checkpoints
    uri: str
    resume: tuple[int, Path] | None
    incidents: Incidents
    repeats: tuple[Incident, ...]
    sent_back: tuple[SentBack, ...]

    @property
    def steps_done_anew(self) -> tuple[Anew, ...]:
        """Steps whose metrics are known and are not those of the weights that the run goes on to."""
        healed = self.incidents.without(self.repeats).steps_done_anew
        sent = ((back.steps_done_anew, back.at) for back in self.sent_back)
        return tuple(Anew.told(steps, at) for steps, at in (*healed, *sent))


def share_of(recipe: Recipe, group: Group) -> Share | None:
    """What a node fetches of a checkpoint; None: all."""
    return Share(group.node + 1, group.nodes, group.on_this_node) if group.nodes > 1 and fetches_share(recipe) else None


def take_up(job: Job, store: Store, work: Path) -> Course:
    """Raises BadConfiguration: nothing could train the recipe here, or the run's checkpoint does not fit it."""
    parameters = TrainParameters.model_validate(job.parameters)
    recipe = parameters.recipe
    refuse_what_is_missing(recipe)
    refuse_what_the_machine_lacks(recipe)
    group = join(job.distributed)
    if group.leads:
        tell_that_there_is_no_gpu(recipe)
        tell_fallback(recipe.computing_dtype)
    recipe = recipe.on(group.size)
    group.together, group.in_stages = recipe.together, recipe.in_stages
    policy, uri = job.checkpoint, job.outputs["checkpoints"]
    share = share_of(recipe, group)
    checkpoints = Checkpoints(work / "checkpoints", store, uri, policy.keep_last, policy.compression, share=share)
    known = group.share(read_incidents(store, uri) if group.leads else Incidents())
    if group.local_rank == 0:
        forget_spoilt(checkpoints.folder, known.diverged)
    checkpoints, resume = resume_together(checkpoints, policy.resume_from, parameters.sent_back, group)
    if resume:
        check_fits(resume, recipe)
    if group.leads:
        checkpoints.catch_up()
    done, repeats = resume[0] if resume else 0, parameters.repeats
    found = what_happened(known, store, uri, recipe, work, done=done, repeats=repeats) if group.leads else Incidents()
    incidents = group.share(found)
    return Course(incidents.fitted(recipe), group, checkpoints, uri, resume, incidents, repeats, parameters.sent_back)
