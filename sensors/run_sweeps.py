"""Advance sweeps: check their trials, stop unpromising ones, start the next ones.

It reads state, not events: after any interruption, the next tick continues from the rows.
"""

from functools import partial

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.job import BadConfiguration, Program
from recipes.contracts.recipe import Recipe
from recipes.planning.recipe_checks import unpinned_model_reason
from resources.compute.base import JobRef
from resources.errors import HanzoError
from resources.hpo.sweep_advance import advance_sweep
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.sweep_step import End, Step
from resources.hpo.sweeps import Sweeps
from resources.hpo.trial_job import build_trial_job
from sensors.decisions.definition_lookup import explain_undefined, find_model_dataset, find_model_recipe, takes_defined_name
from sensors.decisions.job_runs import has_no_unfinished_run
from sensors.sensor import INTERVAL_SECONDS, sensor


@sensor(interval=INTERVAL_SECONDS, description="Runs the trials of each sweep that was started.", requests_runs=False)
def run_sweeps(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    moved = []
    for sweep_id in Sweeps(control_plane.database).running():
        try:
            if fail_unstartable_sweep(context, sweep_id, control_plane):
                continue
            pin_dataset(context, sweep_id, control_plane)
            if advance_sweep(
                control_plane.database, control_plane.store, sweep_id, partial(has_ended, context, control_plane)
            ):
                moved.append(sweep_id)
        except Exception as error:  # one failing sweep must not block the others
            context.log.exception(f"cannot advance sweep {sweep_id}: {error!r}")
    return dg.SensorResult(skip_reason=f"advanced: {', '.join(moved)}" if moved else "no sweep has anything to do")


def has_ended(context: dg.SensorEvaluationContext, control_plane: ControlPlane, job_id: str) -> bool:
    """Whether a trial has no unfinished run and no orphaned program that holds its GPU."""
    return has_no_unfinished_run(context.instance, job_id) and not control_plane.compute.has_processes(
        JobRef(job_id, Program.TRAIN)
    )


def fail_unstartable_sweep(context: dg.SensorEvaluationContext, sweep_id: str, control_plane: ControlPlane) -> bool:
    """Fail a sweep none of whose trials could start; return whether that is so.

    Otherwise each trial would be created as a job and a run, only to fail.
    """
    before = Sweeps(control_plane.database).snapshot(sweep_id)
    reason = "" if before.trials else explain_unstartable(context, before.sweep.config)
    return bool(reason) and Sweeps(control_plane.database).apply_step(before, Step(end=End("failed", reason)))


def explain_unstartable(context: dg.SensorEvaluationContext, config: SweepConfig) -> str:
    """Return what is wrong with the sweep's model or experiment name, or "".

    This is the first place that knows the defined models, and whether the base model's files were pinned since submission.
    """
    job = build_trial_job(config, {name: dimension.at(0.0) for name, dimension in config.search_space.items()})
    if problem := explain_undefined(context, job["model"], list_model_families()):
        return problem
    if takes_defined_name(context, job["model"], job["name"]):
        what = f"experiment '{job['name']}' is the name of a definition, whose gate its versions pass"
        return f"{what}: search with base_config.model: {job['name']}, or give the experiment another name"
    name = job.get("recipe") or find_model_recipe(context, job["model"])
    try:
        recipe = Recipe.named(str(name)).changed(job["parameters"])
    except BadConfiguration:  # only these hyperparameters are invalid
        return ""
    missing = unpinned_model_reason(recipe)
    return f"recipe '{recipe.name}': {missing}" if missing else ""


def list_model_families() -> set[str]:
    """Return the model families that a sweep may name together with a method."""
    return {name.rpartition("-")[0] for name in Recipe.names()}


def pin_dataset(context: dg.SensorEvaluationContext, sweep_id: str, control_plane: ControlPlane) -> None:
    """Pin the current version of the model definition's dataset, unless the sweep names one."""
    sweep = Sweeps(control_plane.database).snapshot(sweep_id).sweep
    if sweep.config.base_config.get("dataset"):
        return
    reference = find_model_dataset(context, build_trial_job(sweep.config, {})["model"])
    if reference is None:
        return
    try:
        version = control_plane.datasets.read(reference, sweep.organization)
    except HanzoError:  # the dataset may not exist: then the trials report it, and the sweep is not blocked
        return
    Sweeps(control_plane.database).set_dataset(sweep_id, version.reference)
