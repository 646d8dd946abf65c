"""Submit jobs, and refuse those that cannot be trained, never fit, or name what they may not.

One validation for `POST /v1/jobs`, for `?dry_run=true`, and for `hanzo-ml job submit --dry-run` without a server.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from recipes.contracts.command_job import CommandJob
from recipes.contracts.frozen_model import Name
from recipes.contracts.job import BadConfiguration, Schedule
from recipes.contracts.pod_settings import Environment, PodSettings
from recipes.contracts.quantities import explain_zero_duration
from recipes.contracts.recipe import Recipe
from recipes.extras import TRAIN, lacking
from recipes.storage.artifact_store import Store
from resources.errors import ErrorCode, HanzoError, invalid
from resources.estimate.admission import admit_dataset, admit_recipe, base_model_shape
from resources.estimate.past_runs import newest_run_params
from resources.jobs.command import SOURCE_KEYS
from resources.jobs.sandbox import SANDBOX
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.field_rules import refuse_unstorable
from resources.metadata.job_record import MASK
from resources.metadata.jobs import JobRecord, Jobs
from resources.metadata.registry.model_names import checked_model_name
from resources.scheduling.quotas import apply_quota, count_gpus, refuse_impossible_job
from resources.settings.settings import Settings

DEFAULT_RECIPE = "smollm2-135m-lora"
"""Stands for the recipe of a model definition, which only the asset graph knows: all recipes have the same keys."""


class NewJob(BaseModel):
    """A training job of a model definition, whose values hold where none are given; or of the sandbox, with a dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    type: Literal["training"] = "training"
    model: Name = SANDBOX
    dataset: str | None = None
    recipe: str | None = None
    parameters: dict[str, JsonValue] = {}
    schedule: Schedule | None = None
    env: Environment = Field({}, exclude_if=lambda value: not value)
    pod: PodSettings = Field(PodSettings(), exclude_if=lambda value: value == PodSettings())

    @model_validator(mode="before")
    @classmethod
    def leaves_the_recipe_s_keys_to_the_parameters(cls, value: Any) -> Any:
        """A job with a command has its `distributed` and `resources` beside its name: so people write them here too."""
        keys = value if isinstance(value, dict) else {}
        if misplaced := next((key for key in keys if key in Recipe.model_fields and key not in cls.model_fields), None):
            raise ValueError(f"'{misplaced}' is a key of the recipe: put it below `parameters:`")
        return value

    @field_validator("type", mode="before")
    @classmethod
    def only_training(cls, value: Any) -> Any:
        if value in ("eval", "conversion", "preprocessing"):
            raise ValueError("such a job needs a `command`: without one, the asset graph evaluates and converts itself")
        return value


@dataclass(frozen=True)
class Submitter:
    """Who submits a job. `from_own_user`: the request comes from the user who started this server, on this machine."""

    user_id: str
    organization: str
    from_own_user: bool


def check_training(
    body: NewJob, database: Database, store: Store, settings: Settings, submitter: Submitter
) -> dict[str, JsonValue]:
    """Return the configuration of the job that would be queued. Writes nothing.

    Raises:
        HanzoError: it cannot be trained, or never fits.
    """
    base, recipe = check_training_alone(body, settings, submitter)
    refuse_missing_packages(settings)
    if body.recipe or body.model == SANDBOX:
        admit_recipe(recipe, base_model_shape(recipe, store))
    elif usual := newest_recipe(body, database, submitter.organization):
        admit_newest_recipe(usual, body.model, store)
    if body.recipe or body.model == SANDBOX or recipe.base_model != base.base_model:
        refuse_unreadable_base(recipe, store)
    version = Datasets(database).read(body.dataset, submitter.organization) if body.dataset is not None else None
    if version and (body.recipe or body.model == SANDBOX):
        admit_dataset(recipe, version)
    quota = settings.scheduler.quotas.get(submitter.organization)
    if quota is not None:
        body = body.model_copy(update={"schedule": apply_quota(body.schedule or Schedule(), quota)})
    config: dict[str, JsonValue] = body.model_dump(mode="json", exclude_none=True)
    if version:
        config["dataset"] = version.reference
    refuse_unstorable([body.name, config], "config")
    return config


def check_training_alone(body: NewJob, settings: Settings, submitter: Submitter) -> tuple[Recipe, Recipe]:
    """The checks that need neither database nor store. Returns the recipe as in its file, and with the job's parameters.

    Raises:
        HanzoError: the job would be refused.
    """
    refuse_incomplete(body)
    refuse_zero_durations(body.schedule)
    refuse_masks(body.env)
    allow_variables(settings, body.env, submitter.from_own_user)
    allow_pod_settings(settings, body.pod)
    base = find_recipe(body.recipe)
    recipe = with_parameters(base, body.parameters)
    allow_base_model(settings, recipe, base)
    allow_image(settings, recipe, base)
    if body.recipe or body.model == SANDBOX:
        quota = settings.scheduler.quotas.get(submitter.organization)
        refuse_impossible_job(quota, count_gpus(recipe.hardware, recipe.distributed))
    return base, recipe


def check_command(job: CommandJob, settings: Settings, submitter: Submitter) -> CommandJob:
    """Return the command job as it would be queued, with the priority that its organization may have.

    Raises:
        HanzoError: the job would be refused.
    """
    quota = settings.scheduler.quotas.get(submitter.organization)
    allow_command(settings, submitter.from_own_user)
    refuse_masks(job.env)
    allow_pod_settings(settings, job.pod)
    refuse_zero_durations(job.schedule)
    refuse_impossible_job(quota, count_gpus(job.resources, job.distributed))
    refuse_unstorable(job.model_dump(mode="json", exclude=SOURCE_KEYS), "config")
    return job.model_copy(update={"schedule": apply_quota(job.schedule, quota)})


def queue_training(
    body: NewJob, database: Database, store: Store, settings: Settings, submitter: Submitter, id: str | None = None
) -> JobRecord:
    """Queue the training job; one of that `id` that is there already stays as it is. Raises as `check_training` does."""
    config = check_training(body, database, store, settings, submitter)
    return Jobs(database).submit(
        name=body.name, config=config, user=submitter.user_id, organization=submitter.organization, id=id
    )


def refuse_incomplete(body: NewJob) -> None:
    """Raises HanzoError where a job of the sandbox lacks what a definition would give it."""
    if body.model == SANDBOX and body.dataset is None:
        raise invalid("a job without a model definition needs a dataset: give `dataset`, or `model`")
    if body.model == SANDBOX:  # its version takes this name, hours from now
        checked_model_name(body.name)


def newest_recipe(body: NewJob, database: Database, organization: str) -> Recipe | None:
    """The recipe of a model definition, which only the asset graph knows, as the newest run of that used it.

    None before the first run, or where that recipe is not there, or otherwise, by now.
    """
    used = newest_run_params(database, body.model, organization)
    try:
        return Recipe.named(used["recipe"]).changed(body.parameters) if "recipe" in used else None
    except BadConfiguration:
        return None


def admit_newest_recipe(recipe: Recipe, model: str, store: Store) -> None:
    """Raises HanzoError where it cannot fit, with a way past: the definition may have another recipe since."""
    try:
        admit_recipe(recipe, base_model_shape(recipe, store))
    except HanzoError as refused:
        raise invalid(
            f"{refused.message} (the recipe of the newest run of model '{model}': give `recipe` if it has another by now)"
        ) from None


def allow_base_model(settings: Settings, recipe: Recipe, unchanged: Recipe) -> None:
    """A folder is read with the rights of this server, and may hold what another organization trained.

    Raises:
        HanzoError: people sign in here, and the job names a folder that its recipe does not.
    """
    own = unchanged.base_model
    if settings.auth.verify_tokens and recipe.base_model != own and recipe.base_model.is_folder:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "base_model.uri names a folder of this server, which none may where people sign in: name a package, or ask the "
            "operator for a recipe with this base model",
        )


def refuse_zero_durations(schedule: Schedule | None) -> None:
    """Of a job that was given no seconds, each start failed. Raises HanzoError."""
    for key in ("max_duration", "checkpoint_interval", "grace_period", "stall_limit"):
        given = getattr(schedule, key, None)
        if given is not None and (problem := explain_zero_duration(f"schedule.{key}", given)):
            raise invalid(problem)


def refuse_missing_packages(settings: Settings) -> None:
    """The local backend trains on this machine: refuse at once what it lacks, not at the job's start.

    Raises:
        HanzoError: packages of the extra `train` are not installed.
    """
    if settings.scheduler.backend == "local" and (problem := lacking("a training job", TRAIN)):
        raise invalid(problem)


def refuse_unreadable_base(recipe: Recipe, store: Store) -> None:
    """Of what a job was to begin with, the program found out with the GPUs in its hands that nobody can read it.

    A folder is looked for where the store is one too: this machine trains. Raises HanzoError.
    """
    base = recipe.base_model
    if base.artifact_uri and store.find(base.artifact_uri):
        return
    problem = base.problem
    if problem is None and base.is_folder and store.local_path(str(base.artifact_uri)):
        problem = base.missing_folder_problem
    if problem:
        raise invalid(f"recipe '{recipe.name}': {problem}")


def allow_image(settings: Settings, recipe: Recipe, unchanged: Recipe) -> None:
    """What code a job runs with, besides its own, is the operator's choice where people sign in and share a namespace.

    Raises:
        HanzoError: people sign in here, and the job names an image that its recipe does not.
    """
    if not settings.auth.verify_tokens or has_own_namespaces(settings):
        return
    if recipe.image not in (None, unchanged.image):
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "image is one of your own, which none may name where people sign in: ask the operator for a recipe with it, or "
            "for scheduler.namespace_per_organization on a cluster",
        )


def has_own_namespaces(settings: Settings) -> bool:
    """Whether what a job runs reaches nothing of other organizations: its pod is the boundary."""
    return settings.scheduler.backend == "kubernetes" and settings.scheduler.namespace_per_organization


def allow_command(settings: Settings, from_own_user: bool) -> None:
    """On this machine a command has the rights of the user who started this server, so it is accepted from that user alone.

    On a cluster it has those of its pod. Where organizations have namespaces of their own, everybody who signs in may submit
    one; where all share a namespace and its network, the operator decides (`scheduler.user_commands`).

    Raises:
        HanzoError: people sign in here, or somebody else sent it.
    """
    on_cluster = settings.scheduler.backend == "kubernetes"
    if on_cluster and settings.auth.verify_tokens and (settings.scheduler.user_commands or has_own_namespaces(settings)):
        return
    if settings.auth.verify_tokens:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "a job with a `command` would run with the rights of this server's own user, so none is taken where people "
            "sign in: submit one with a `recipe`, or start a stack of your own with `hanzo-ml up`",
        )
    if not from_own_user:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "a job with a `command` would run with the rights of this server's own user, and is taken from that user alone, "
            "on this machine and not through a proxy: start a stack of your own with `hanzo-ml up`",
        )


def allow_variables(settings: Settings, env: Mapping[str, str], from_own_user: bool) -> None:
    """Some variables, such as LD_PRELOAD, decide what code a process runs: here one of this server's own user.

    Raises:
        HanzoError: jobs run on this machine, and people sign in here or somebody else sent it.
    """
    if env and settings.scheduler.backend == "local" and (settings.auth.verify_tokens or not from_own_user):
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "env would set variables of a process with the rights of this server's own user, so it is accepted from that "
            "user alone, without sign-in: remove it, or have the operator run jobs on a cluster (scheduler.backend)",
        )


def allow_pod_settings(settings: Settings, pod: PodSettings) -> None:
    """Secrets, volumes and nodes that jobs can reach may belong to others, or to the platform.

    Raises:
        HanzoError: people sign in here, and the job names one that the settings do not list.
    """
    if not settings.auth.verify_tokens:
        return
    named = {
        "user_secrets": (*pod.secrets, *pod.image_pull_secrets),
        "user_claims": tuple(volume.claim for volume in pod.volumes),
        "user_writable_claims": tuple(volume.claim for volume in pod.volumes if not volume.read_only),
        "user_node_labels": tuple(pod.node_selector),
        "user_tolerations": tuple(toleration.key or "every taint" for toleration in pod.tolerations),
    }
    for key, names in named.items():
        if denied := sorted({*names} - {*getattr(settings.scheduler, key)}):
            raise HanzoError(
                ErrorCode.PERMISSION_DENIED,
                f"pod names {denied[0]!r}, which jobs may not use: ask the operator to add it to scheduler.{key}",
            )


def refuse_masks(env: Mapping[str, str]) -> None:
    """A job file that was made of what this server answers. Raises HanzoError, naming the variable."""
    if masked := next((name for name, value in env.items() if value == MASK), None):
        raise invalid(f"env.{masked} is the mask that hides a value in answers of this server: give the value itself")


def find_recipe(name: str | None) -> Recipe:
    """A recipe as it stands in its file. Raises HanzoError where there is none of that name."""
    try:
        return Recipe.named(name or DEFAULT_RECIPE)
    except BadConfiguration as problem:
        raise invalid(str(problem)) from None


def with_parameters(recipe: Recipe, parameters: Mapping[str, JsonValue]) -> Recipe:
    """Refuse now what would fail when the job is started: parameters that do not fit the recipe. Raises HanzoError."""
    try:
        return recipe.changed(parameters)
    except BadConfiguration as problem:
        raise invalid(str(problem)) from None
