"""A sweep goes on -> look at its trials, stop those that lead nowhere, start the next ones (rows K1-K7).

It follows the rows and not the events: whatever was killed in between, the next look finds the sweep as it stands.
"""

from functools import partial

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.job import BadConfiguration, Program
from recipes.contracts.recipe import Recipe
from recipes.planning.recipe_checks import unpinned
from resources.compute.job_key import JobRef
from resources.errors import HanzoError
from resources.hpo.sweep_advance import advance
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.sweep_step import End, Step
from resources.hpo.sweeps import Sweeps
from resources.hpo.trial_job import trial_job
from sensors.decisions.definition_lookup import dataset_of, is_of_another_definition, recipe_of, undefined
from sensors.decisions.job_runs import is_gone
from sensors.event_cursor import INTERVAL_SECONDS
from sensors.sensor import sensor


@sensor(interval=INTERVAL_SECONDS, description="Runs the trials of each sweep that was started.", requests_runs=False)
def run_sweeps(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    moved = []
    for sweep_id in Sweeps(control_plane.database).running():
        try:
            if refuse(context, sweep_id, control_plane):
                continue
            pin_dataset(context, sweep_id, control_plane)
            if advance(control_plane.database, control_plane.store, sweep_id, partial(has_ended, context, control_plane)):
                moved.append(sweep_id)
        except Exception as error:  # whatever it is: one that stumbles holds up no other
            context.log.exception(f"sweep {sweep_id} cannot go on: {error!r}")
    return dg.SensorResult(skip_reason=f"went on: {', '.join(moved)}" if moved else "no sweep has anything to do")


def has_ended(context: dg.SensorEvaluationContext, control_plane: ControlPlane, job_id: str) -> bool:
    """Whether a trial has ended: no Dagster run, and no program whose run worker died, which still holds the GPU."""
    return is_gone(context.instance, job_id) and not control_plane.compute.has_processes(JobRef(job_id, Program.TRAIN))


def refuse(context: dg.SensorEvaluationContext, sweep_id: str, control_plane: ControlPlane) -> bool:
    """Whether none of a sweep's trials could start: each of them was made, a job and a run of its own, and failed for it."""
    before = Sweeps(control_plane.database).snapshot(sweep_id)
    reason = "" if before.trials else why_none_could_start(context, before.sweep.config)
    return bool(reason) and Sweeps(control_plane.database).take(before, Step(end=End("failed", reason)))


def why_none_could_start(context: dg.SensorEvaluationContext, config: SweepConfig) -> str:
    """What is wrong with the sweep's model or the name of its experiment, or nothing.

    Only here is it known which models are defined, and only now, whether the base model's files were pinned since it was
    asked for.
    """
    job = trial_job(config, {name: dimension.at(0.0) for name, dimension in config.search_space.items()})
    if problem := undefined(context, job["model"], families()):
        return problem
    if is_of_another_definition(context, job["model"], job["name"]):
        what = f"experiment '{job['name']}' is the name of a definition, whose gate its versions pass"
        return f"{what}: search with base_config.model: {job['name']}, or give the experiment another name"
    name = job.get("recipe") or recipe_of(context, job["model"])
    try:
        recipe = Recipe.named(str(name)).changed(job["parameters"])
    except BadConfiguration:  # of these hyperparameters: others may fit
        return ""
    missing = unpinned(recipe)
    return f"recipe '{recipe.name}': {missing}" if missing else ""


def families() -> set[str]:
    """What a sweep may name as its model beside a method, as the specification's does."""
    return {name.rpartition("-")[0] for name in Recipe.names()}


def pin_dataset(context: dg.SensorEvaluationContext, sweep_id: str, control_plane: ControlPlane) -> None:
    """A sweep that names no dataset takes its model definition's, and all of its trials the version of now."""
    sweep = Sweeps(control_plane.database).snapshot(sweep_id).sweep
    if sweep.config.base_config.get("dataset"):
        return
    reference = dataset_of(context, trial_job(sweep.config, {})["model"])
    if reference is None:
        return
    try:
        version = control_plane.datasets.read(reference, sweep.organization)
    except HanzoError:  # and that there is no such dataset: a sweep without any trial would say nothing at all
        return
    Sweeps(control_plane.database).set_dataset(sweep_id, version.reference)
