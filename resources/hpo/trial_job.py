"""The job of a trial: what `POST /v1/jobs` would take, made of a sweep's base_config and a trial's hyperparameters."""

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from recipes.recipe import Recipe
from resources.errors import invalid
from resources.hpo.config import SweepConfig
from resources.hpo.population import steps_of_a_generation
from resources.hpo.space import Params

SANDBOX = "sandbox"
DEFAULT_METHOD = "lora"
OF_A_JOB = ("model", "dataset", "recipe", "method", "parameters")
"""Keys of base_config that are not the recipe's."""


def trial_job(config: SweepConfig, params: Params) -> dict[str, Any]:
    """Name, model, dataset, recipe and parameters of a job.

    `model` with `method` names a recipe where there is one, such as `zen-7b` with `lora`: the job then runs in the sandbox.
    Else it is a model definition.

    Raises:
        HanzoError: base_config does not say what to train, or on what.
    """
    base = config.base_config
    model, recipe = str(base.get("model") or SANDBOX), base.get("recipe")
    given: Any = base.get("parameters") or {}
    if not isinstance(given, Mapping):
        raise invalid("base_config.parameters must be a mapping of the recipe's keys")
    parameters: dict[str, JsonValue] = {**given, **{key: value for key, value in base.items() if key not in OF_A_JOB}}
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
        steps = parameters["max_steps"] = steps_of_a_generation(config)
        if isinstance(every := parameters.get("eval_steps"), int):
            parameters["eval_steps"] = min(every, steps)
    job = {"name": config.experiment, "type": "training", "model": model, "dataset": base.get("dataset"), "recipe": recipe}
    return {key: value for key, value in job.items() if value is not None} | {"parameters": {**parameters, **params}}
