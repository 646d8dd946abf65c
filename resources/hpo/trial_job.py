"""Build the job of a trial from a sweep's base_config and the trial's hyperparameters.

The job is in the form that `POST /v1/jobs` accepts.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue, ValidationError

from recipes.contracts.job import Schedule
from recipes.contracts.pod_settings import PodSettings
from recipes.contracts.recipe import Recipe
from recipes.contracts.validation_errors import explain_first_error
from resources.errors import invalid
from resources.hpo.search_space import Params
from resources.hpo.strategies import generation_steps
from resources.hpo.sweep_config import SweepConfig
from resources.jobs.sandbox import SANDBOX

DEFAULT_METHOD = "lora"
NAME_KEYS = ("model", "dataset", "recipe", "method")
SEED_RANGE = 2**32
"""A recipe's seed is less than this."""
JOB_KEYS = (*NAME_KEYS, "parameters", "schedule", "pod")
"""Keys of base_config that belong to the job, not to its recipe."""
DEFAULT_PRIORITY = "low"
"""Default priority of a trial's job: according to the specification, other jobs go before sweeps."""


def build_trial_job(config: SweepConfig, params: Params, generation: int = 0) -> dict[str, Any]:
    """Return name, model, dataset, recipe, schedule and parameters of a job.

    `model` with `method` names a recipe if there is one, such as `zen-7b` with `lora`: the job then runs in the sandbox.
    Otherwise it names a model definition. Each generation of a population has a seed of its own: with one seed, all
    generations trained on the same samples, the first ones of one order, however long the population continued.

    Raises:
        HanzoError: base_config does not state what to train, or on what.
    """
    base = config.base_config
    model, recipe = str(base.get("model") or SANDBOX), base.get("recipe")
    given: Any = base.get("parameters") or {}
    if not isinstance(given, Mapping):
        raise invalid("base_config.parameters must be a mapping of the recipe's keys")
    parameters: dict[str, JsonValue] = {**given, **{key: value for key, value in base.items() if key not in JOB_KEYS}}
    family = f"{model}-{base.get('method') or DEFAULT_METHOD}"
    if recipe is None and family in Recipe.names():
        recipe, model = family, SANDBOX
    elif "method" in base:
        parameters["method"] = base["method"]
    if model == SANDBOX and not base.get("dataset"):
        raise invalid("base_config needs a dataset: NAME or NAME@VERSION")
    if config.resources_per_trial is not None:
        parameters["hardware"] = config.resources_per_trial.model_dump(mode="json")
    if config.strategy == "pbt":
        steps = parameters["max_steps"] = generation_steps(config)
        if isinstance(every := parameters.get("eval_steps"), int):
            parameters["eval_steps"] = min(every, steps)
    parameters |= params
    if generation:
        parameters["seed"] = (trial_seed(recipe, parameters) + generation) % SEED_RANGE
    job = {"name": config.experiment, "type": "training", "model": model, "dataset": base.get("dataset"), "recipe": recipe}
    known = {key: value for key, value in job.items() if value is not None}
    return {
        **known,
        "schedule": parse_schedule(base.get("schedule")),
        **parse_pod(base.get("pod")),
        "parameters": parameters,
    }


def parse_schedule(given: JsonValue) -> dict[str, JsonValue]:
    given = {} if given is None else given
    wanted = {"priority": DEFAULT_PRIORITY, **given} if isinstance(given, Mapping) else given
    try:
        return Schedule.model_validate(wanted).model_dump(mode="json", exclude_none=True)
    except ValidationError as error:
        raise invalid(f"base_config.schedule: {explain_first_error(error, Schedule)}") from None


def parse_pod(given: JsonValue) -> dict[str, JsonValue]:
    """Return the job's key `pod`, or nothing if it has only defaults."""
    try:
        pod = PodSettings.model_validate({} if given is None else given)
    except ValidationError as error:
        raise invalid(f"base_config.pod: {explain_first_error(error, PodSettings)}") from None
    return {} if pod == PodSettings() else {"pod": pod.model_dump(mode="json")}


def trial_seed(recipe: JsonValue, parameters: Mapping[str, JsonValue]) -> int:
    """Return the seed of a trial's recipe.

    For a model definition the default is used, because only the asset graph knows its recipe.
    """
    given: Any = parameters.get("seed")
    if given is not None:
        return int(given)
    return Recipe.named(str(recipe)).seed if recipe else int(Recipe.model_fields["seed"].default)


def trial_steps(config: SweepConfig, params: Params, generation: int = 0) -> int | None:
    """Return the steps that a trial trains.

    None for a model definition without `max_steps`, because only the asset graph knows its recipe.
    """
    job = build_trial_job(config, params, generation)
    given = job["parameters"].get("max_steps")
    if given is None and "recipe" in job:
        given = Recipe.named(job["recipe"]).max_steps
    return None if given is None else int(given)
