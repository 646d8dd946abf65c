"""Validate and submit jobs; refuse what cannot be trained, never fits, or is not permitted.

The same checks serve `POST /v1/jobs`, `?dry_run=true`, and `hanzo-ml job submit --dry-run` without a server.
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
"""Stands in for a model definition's recipe, which only the asset graph knows: all recipes have the same keys."""


class NewJob(BaseModel):
    """A training job of a model definition, or of the sandbox with a dataset."""

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
        """Reject recipe keys at the top level, where command jobs have `distributed` and `resources`."""
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
    """Who submits a job.

    `from_own_user`: the request comes from the user who started this server, on this machine.
    """

    user_id: str
    organization: str
    from_own_user: bool


def check_training(
    body: NewJob, database: Database, store: Store, settings: Settings, submitter: Submitter
) -> dict[str, JsonValue]:
    """Return the configuration of the job that would be queued. Writes nothing.

    Raises:
        HanzoError: the job cannot be trained, or never fits.
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
    """Run the checks without database and store; return the recipe without and with parameters.

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
    """Return the command job to queue, with its priority limited to the organization's.

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
    """Queue a training job, unless one has that `id`. Raises like `check_training`."""
    config = check_training(body, database, store, settings, submitter)
    return Jobs(database).submit(
        name=body.name, config=config, user=submitter.user_id, organization=submitter.organization, id=id
    )


def refuse_incomplete(body: NewJob) -> None:
    """Raise HanzoError if a sandbox job lacks what a definition would supply."""
    if body.model == SANDBOX and body.dataset is None:
        raise invalid("a job without a model definition needs a dataset: give `dataset`, or `model`")
    if body.model == SANDBOX:  # the version gets this name when training has ended
        checked_model_name(body.name)


def newest_recipe(body: NewJob, database: Database, organization: str) -> Recipe | None:
    """Return the recipe that the newest run of a model definition used.

    Only the asset graph knows the definition's recipe. None before the first run, or if that recipe no longer exists or
    rejects the parameters.
    """
    used = newest_run_params(database, body.model, organization)
    try:
        return Recipe.named(used["recipe"]).changed(body.parameters) if "recipe" in used else None
    except BadConfiguration:
        return None


def admit_newest_recipe(recipe: Recipe, model: str, store: Store) -> None:
    """Raise HanzoError if the recipe cannot fit, allowing for a newer one in the definition."""
    try:
        admit_recipe(recipe, base_model_shape(recipe, store))
    except HanzoError as refused:
        raise invalid(
            f"{refused.message} (the recipe of the newest run of model '{model}': set `recipe` if the definition changed)"
        ) from None


def allow_base_model(settings: Settings, recipe: Recipe, unchanged: Recipe) -> None:
    """Allow a base model folder only if the recipe names it, when users sign in.

    It is read with the server's permissions, and may contain what another organization trained.

    Raises:
        HanzoError: users sign in, and the job names a folder that its recipe does not.
    """
    own = unchanged.base_model
    if settings.auth.verify_tokens and recipe.base_model != own and recipe.base_model.is_folder:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "base_model.uri names a folder of this server, which is not allowed where users sign in: name a package, or ask "
            "the operator for a recipe with this base model",
        )


def refuse_zero_durations(schedule: Schedule | None) -> None:
    """Raise HanzoError for durations of zero, with which every start would fail."""
    for key in ("max_duration", "checkpoint_interval", "grace_period", "stall_limit"):
        given = getattr(schedule, key, None)
        if given is not None and (problem := explain_zero_duration(f"schedule.{key}", given)):
            raise invalid(problem)


def refuse_missing_packages(settings: Settings) -> None:
    """Check that this machine can train, which the local backend needs, before the job starts.

    Raises:
        HanzoError: packages of the extra `train` are missing.
    """
    if settings.scheduler.backend == "local" and (problem := lacking("a training job", TRAIN)):
        raise invalid(problem)


def refuse_unreadable_base(recipe: Recipe, store: Store) -> None:
    """Raise HanzoError if the base model cannot be read, before GPUs are allocated.

    A folder is checked only if the store is one too: then this machine trains.
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
    """Allow only the recipe's image where users sign in and share a namespace.

    There the operator decides which other code runs with the job's own.

    Raises:
        HanzoError: users sign in, and the job names an image that its recipe does not.
    """
    if not settings.auth.verify_tokens or has_own_namespaces(settings):
        return
    if recipe.image not in (None, unchanged.image):
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "image differs from the recipe's, which is not allowed where users sign in: ask the operator for a recipe with "
            "it, or for scheduler.namespace_per_organization on a cluster",
        )


def has_own_namespaces(settings: Settings) -> bool:
    """Whether a job's pod is isolated from those of other organizations."""
    return settings.scheduler.backend == "kubernetes" and settings.scheduler.namespace_per_organization


def allow_command(settings: Settings, from_own_user: bool) -> None:
    """Allow a command job from the server's own user or on an isolating cluster.

    On this machine a command runs with the rights of the user who started this server. On a cluster it has those of its pod:
    with a namespace per organization every signed-in user may submit one, in a shared namespace and network the operator
    decides (`scheduler.user_commands`).

    Raises:
        HanzoError: users sign in, or the request comes from another user.
    """
    on_cluster = settings.scheduler.backend == "kubernetes"
    if on_cluster and settings.auth.verify_tokens and (settings.scheduler.user_commands or has_own_namespaces(settings)):
        return
    if on_cluster and settings.auth.verify_tokens:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "a job with a `command` is not accepted here, because all organizations share the namespace of jobs: submit one "
            "with a `recipe`, or ask the operator to set scheduler.user_commands or scheduler.namespace_per_organization",
        )
    if settings.auth.verify_tokens:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "a job with a `command` would run with the rights of this server's own user, so it is not accepted where users "
            "sign in: submit one with a `recipe`, or start your own stack with `hanzo-ml up`",
        )
    if not from_own_user:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "a job with a `command` would run with the rights of this server's own user, and is accepted only from that "
            "user on this machine, not through a proxy: start your own stack with `hanzo-ml up`",
        )


def allow_variables(settings: Settings, env: Mapping[str, str], from_own_user: bool) -> None:
    """Allow environment variables where they cannot inject code into the server's own user.

    Some, such as LD_PRELOAD, decide which code a process runs.

    Raises:
        HanzoError: jobs run on this machine, and users sign in or the request comes from another user.
    """
    if env and settings.scheduler.backend == "local" and (settings.auth.verify_tokens or not from_own_user):
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            "env would set variables of a process with the rights of this server's own user, so it is accepted from that "
            "user alone, without sign-in: remove it, or have the operator run jobs on a cluster (scheduler.backend)",
        )


def allow_pod_settings(settings: Settings, pod: PodSettings) -> None:
    """Allow the secrets, volumes and nodes that the settings list, where users sign in.

    Others may belong to other users or to the platform.

    Raises:
        HanzoError: users sign in, and the job names one that is not listed.
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
    """Raise HanzoError for a value that is this server's mask, as copied from its answers."""
    if masked := next((name for name, value in env.items() if value == MASK), None):
        raise invalid(f"env.{masked} is the mask that replaces values in this server's answers: set the value itself")


def find_recipe(name: str | None) -> Recipe:
    """Return a recipe as stored in its file. Raises HanzoError if there is none."""
    try:
        return Recipe.named(name or DEFAULT_RECIPE)
    except BadConfiguration as problem:
        raise invalid(str(problem)) from None


def with_parameters(recipe: Recipe, parameters: Mapping[str, JsonValue]) -> Recipe:
    """Return the recipe with parameters. Raises HanzoError for invalid ones, before the job starts."""
    try:
        return recipe.changed(parameters)
    except BadConfiguration as problem:
        raise invalid(str(problem)) from None
