"""Look up the definition that a dataset or model belongs to."""

from collections.abc import Iterable
from dataclasses import dataclass

import dagster as dg

from hanzo_ml_assets.training import DATASET_METADATA, RECIPE_METADATA
from recipes.contracts.validation_errors import suggest_spelling
from resources.jobs.sandbox import SANDBOX
from resources.metadata.datasets import DatasetVersion
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION


def find_definition(context: dg.SensorEvaluationContext, kind: str, name: str) -> str:
    """Return the name of the dataset's or model's own definition, else the sandbox."""
    assert context.repository_def is not None
    step = "version" if kind == "datasets" else "checkpoint"
    return name if context.repository_def.asset_graph.has(dg.AssetKey([kind, name, step])) else SANDBOX


def find_version_definition(context: dg.SensorEvaluationContext, version: DatasetVersion) -> str:
    """Return the version's definition: definitions apply to datasets of the default organization only."""
    return find_definition(context, "datasets", version.name) if version.organization == DEFAULT_ORGANIZATION else SANDBOX


def find_model_dataset(context: dg.SensorEvaluationContext, model: str) -> str | None:
    """Return the dataset that a model's definition names, or None without a definition."""
    return read_definition_metadata(context, model, DATASET_METADATA)


def find_model_recipe(context: dg.SensorEvaluationContext, model: str) -> str | None:
    """Return the recipe that a model's definition names, or None without a definition."""
    return read_definition_metadata(context, model, RECIPE_METADATA)


@dataclass(frozen=True)
class DefinedModel:
    """The part of a model's definition that planning a training job needs."""

    name: str
    dataset: str
    recipe: str


def find_model(context: dg.SensorEvaluationContext, name: str) -> DefinedModel:
    """Return a model's definition. Raises KeyError without one."""
    dataset, recipe = find_model_dataset(context, name), find_model_recipe(context, name)
    if dataset is None or recipe is None:
        raise KeyError(name)
    return DefinedModel(name, dataset, recipe)


def takes_defined_name(context: dg.SensorEvaluationContext, model: str, name: str) -> bool:
    """Whether a sandbox job's versions would belong to a defined model and bypass its gate."""
    return model == SANDBOX and name != SANDBOX and find_model_dataset(context, name) is not None


def list_defined_models(context: dg.SensorEvaluationContext) -> list[str]:
    """Return the names of all models that have a definition, sorted."""
    assert context.repository_def is not None
    keys = [key.path for key in context.repository_def.asset_graph.get_all_asset_keys()]
    names = {path[1] for path in keys if len(path) == 3 and (path[0], path[2]) == ("models", "checkpoint")}
    return sorted(names - {SANDBOX})


def explain_undefined(context: dg.SensorEvaluationContext, model: str, others: Iterable[str] = ()) -> str:
    """Return the error for a model without a definition, or "". `others` are further suggestions."""
    if find_model_dataset(context, model) is not None:
        return ""
    meant = suggest_spelling(model, [*list_defined_models(context), *others])
    instead = f"did you mean '{meant}'? Else add" if meant else "add"
    return f"there is no model definition '{model}': {instead} hanzo_ml_assets/defs/{model}/defs.yaml"


def read_definition_metadata(context: dg.SensorEvaluationContext, model: str, what: str) -> str | None:
    assert context.repository_def is not None
    key = dg.AssetKey(["models", model, "checkpoint"])
    graph = context.repository_def.asset_graph
    return str(graph.get(key).metadata[what]) if graph.has(key) else None
