"""/v1/hpo: start, inspect and cancel sweeps. A sensor advances them."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Query
from pydantic import ValidationError

from api.auth.permissions import Caller, Permission
from api.dependencies import CallerDep, DatabaseDep, SettingsDep, StoreDep
from api.idempotency import IdempotencyKey, sweep_id_from_key
from api.json_bodies import TypedResponse, json_response
from api.routing import Router
from api.schemas.v1.sweeps import Sweep, Trials, sweep_json, trial_json
from api.schemas.v1.sweeps import Sweeps as SweepsPage
from recipes.contracts.job import Schedule
from recipes.contracts.pod_settings import PodSettings
from recipes.contracts.validation_errors import explain_first_error
from resources.errors import HanzoError, invalid
from resources.estimate.admission import admit_dataset, admit_recipe, base_model_shape
from resources.hpo.search_space import Choice, Dimension, Params, Value
from resources.hpo.sweep_advance import cancel_sweep
from resources.hpo.sweep_config import SweepConfig, SweepRequest
from resources.hpo.sweep_validation import check_recipe, check_sweep
from resources.hpo.sweeps import MAX_PAGE, MAX_TRIALS, Sweeps
from resources.hpo.trial_job import build_trial_job, parse_schedule
from resources.jobs.sandbox import SANDBOX
from resources.jobs.submission import (
    allow_base_model,
    allow_image,
    allow_pod_settings,
    find_recipe,
    refuse_unreadable_base,
    refuse_zero_durations,
    with_parameters,
)
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.registry.model_names import checked_model_name
from resources.scheduling.quotas import apply_quota, count_gpus, refuse_impossible_job, refuse_oversized_sweep
from resources.settings.scheduler import Quota
from resources.settings.sections import Hpo

router = Router("/v1/hpo", tag="v1")

PROBE_POSITIONS = (0.0, 0.37, 1.0)
"""Positions in a range at which the recipe is checked before a sweep starts: the ends, and a fractional value."""
MAX_PROBES = 1000
"""Each checks a recipe during the request, in less than a millisecond."""


@router.post("", Permission.HPO_CREATE, status_code=201)
def start(
    body: SweepRequest,
    database: DatabaseDep,
    store: StoreDep,
    settings: SettingsDep,
    caller: CallerDep,
    idempotency_key: IdempotencyKey = None,
) -> TypedResponse[Sweep]:
    """Start a sweep, with its dataset pinned to the current version.

    A sweep is refused if a trial could not be trained, or if it exceeds the quota of a researcher's organization. A
    repeated Idempotency-Key returns the existing sweep, and ignores the body.
    """
    key = idempotency_key and sweep_id_from_key(idempotency_key, caller)
    sweeps = Sweeps(database)
    if key and sweeps.exists(key):
        return json_response(sweep_json(sweeps.snapshot(key)), 201)
    quota = settings.scheduler.quotas.get(caller.organization)
    config, version = with_pinned_dataset(with_server_limits(body, settings.hpo, quota), database, caller)
    config = with_schedule(config, quota)
    refuse_zero_durations(Schedule.model_validate(parse_schedule(config.base_config.get("schedule"))))
    if (values := sum(len(probe_values(dimension)) for dimension in config.search_space.values())) > MAX_PROBES:
        raise invalid(
            f"search_space has {values} values to check, at most {MAX_PROBES} are allowed: use ranges for long choices"
        )
    first = build_trial_job(config, {})
    allow_pod_settings(settings, PodSettings.model_validate(first.get("pod", {})))
    if first["model"] == SANDBOX:
        check_name(config.experiment)
    base = find_recipe(first.get("recipe"))
    gpus, readable = 0, {base.base_model}  # the recipe's own base model may be pinned before a trial needs it
    for params in probes(config):
        job = build_trial_job(config, params)
        recipe = with_parameters(base, job["parameters"])
        allow_base_model(settings, recipe, base)
        allow_image(settings, recipe, base)
        if job["model"] == SANDBOX:
            admit_recipe(recipe, base_model_shape(recipe, store))
        if "recipe" in job or job["model"] == SANDBOX:  # else the recipe is the definition's, known to the asset graph only
            check_recipe(config, recipe)
            if version:
                admit_dataset(recipe, version)
            gpus = max(gpus, count_gpus(recipe.hardware, recipe.distributed))
        if recipe.base_model not in readable:
            refuse_unreadable_base(recipe, store)
            readable.add(recipe.base_model)
    refuse_impossible_job(quota, gpus)
    if not caller.is_admin:  # an admin's trials wait for each other if they do not fit at once
        refuse_oversized_sweep(quota, min(config.max_concurrent_trials, config.wanted_trials), gpus)
    found = sweeps.start(config, user=caller.user_id, organization=caller.organization, id=key)
    return json_response(sweep_json(sweeps.snapshot(found.id)), 201)


def check_name(experiment: str) -> None:
    """Raise HanzoError if the best trial's version could not be registered under the name."""
    try:
        checked_model_name(experiment, "experiment")
    except HanzoError as error:
        raise invalid(f"experiment is the name of the best trial's model: {error.message}") from None


def with_server_limits(body: SweepRequest, limits: Hpo, quota: Quota | None) -> SweepConfig:
    """Complete the sweep with the server's defaults and limits.

    It runs no more trials at once than its organization may run jobs.
    """
    if body.max_concurrent_trials > limits.max_concurrent_trials and "max_concurrent_trials" in body.model_fields_set:
        raise invalid(
            f"max_concurrent_trials is {body.max_concurrent_trials}: this server allows {limits.max_concurrent_trials} "
            "(hpo.max_concurrent_trials)"
        )
    places = limits.max_concurrent_trials
    if quota is not None and quota.max_concurrent_jobs is not None:
        places = min(places, quota.max_concurrent_jobs)
    try:
        config = body.completed(limits.default_strategy, places)
    except ValidationError as error:
        raise invalid(explain_first_error(error, SweepConfig)) from None
    check_sweep(config)
    return config


def with_pinned_dataset(
    config: SweepConfig, database: Database, caller: Caller
) -> tuple[SweepConfig, DatasetVersion | None]:
    """Pin the dataset to its current version for all trials; return both."""
    reference = config.base_config.get("dataset")
    if reference is None:
        return config, None
    version = Datasets(database).read(str(reference), caller.organization)
    return config.model_copy(update={"base_config": {**config.base_config, "dataset": version.reference}}), version


def with_schedule(config: SweepConfig, quota: Quota | None) -> SweepConfig:
    """Set the schedule that the organization's quota gives to trials."""
    if quota is None:
        return config
    schedule = apply_quota(Schedule.model_validate(parse_schedule(config.base_config.get("schedule"))), quota)
    given = schedule.model_dump(mode="json", exclude_none=True)
    return config.model_copy(update={"base_config": {**config.base_config, "schedule": given}})


def probes(config: SweepConfig) -> Iterator[Params]:
    """Yield hyperparameters that vary one dimension at a time over its values to check."""
    first: dict[str, Value] = {name: dimension.at(0.0) for name, dimension in config.search_space.items()}
    for name, dimension in config.search_space.items():
        yield from ({**first, name: value} for value in probe_values(dimension))


def probe_values(dimension: Dimension) -> list[Value]:
    return list(dimension.values) if isinstance(dimension, Choice) else [dimension.at(share) for share in PROBE_POSITIONS]


@router.get("", Permission.HPO_READ)
def list_sweeps(
    database: DatabaseDep,
    caller: CallerDep,
    status: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    page_token: str | None = None,
) -> TypedResponse[SweepsPage]:
    """List the sweeps of the caller's organization, newest first."""
    sweeps = Sweeps(database)
    found, token = sweeps.page(caller.organization, status, limit=limit, page_token=page_token)
    page: SweepsPage = {"sweeps": [sweep_json(sweeps.snapshot(sweep.id)) for sweep in found]}
    if token:
        page["next_page_token"] = token
    return json_response(page)


@router.get("/{sweep_id}", Permission.HPO_READ)
def get(sweep_id: str, database: DatabaseDep) -> TypedResponse[Sweep]:
    """Return the state of a sweep, and its best trial."""
    return json_response(sweep_json(Sweeps(database).snapshot(sweep_id)))


@router.get("/{sweep_id}/trials", Permission.HPO_READ)
def trials(
    sweep_id: str,
    database: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=MAX_TRIALS)] = MAX_TRIALS,
    page_token: str | None = None,
) -> TypedResponse[Trials]:
    """List the trials of a sweep in order."""
    found, token = Sweeps(database).trials(sweep_id, limit=limit, page_token=page_token)
    page: Trials = {"trials": [trial_json(trial, job) for trial, job in found]}
    if token:
        page["next_page_token"] = token
    return json_response(page)


@router.post("/{sweep_id}/cancel", Permission.HPO_CANCEL)
def cancel(sweep_id: str, database: DatabaseDep, store: StoreDep) -> TypedResponse[Sweep]:
    """Cancel a sweep and the jobs of its trials; ended trials keep their values."""
    cancel_sweep(database, store, sweep_id)
    return json_response(sweep_json(Sweeps(database).snapshot(sweep_id)))
