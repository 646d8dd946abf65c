"""The components that a `defs.yaml` can name, each a group of assets."""

from importlib import import_module
from pathlib import Path
from typing import Self

import dagster as dg
from pydantic import BaseModel

from hanzo_ml_assets.datasets import build_dataset_assets
from hanzo_ml_assets.definition_schema import DatasetDefinition, ModelDefinition
from hanzo_ml_assets.deployment import build_deployment
from hanzo_ml_assets.evaluation import build_evaluation
from hanzo_ml_assets.export import build_exports
from hanzo_ml_assets.model_version import build_promotion, build_version
from hanzo_ml_assets.training import build_checkpoint
from recipes.contracts.recipe import Recipe
from resources.installation import SOURCE


class Dataset(dg.Component):  # type: ignore[misc]
    """datasets/NAME: source -> version -> train, validation, test. Its attributes are a `DatasetDefinition`."""

    def __init__(self, definition: DatasetDefinition) -> None:
        self.definition = definition

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return DatasetDefinition

    @classmethod
    def load(cls, attributes: DatasetDefinition, context: dg.ComponentLoadContext) -> Self:
        return cls(attributes)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return dg.Definitions(assets=build_dataset_assets(self.definition, Path(context.path)))


class FineTunedModel(dg.Component):  # type: ignore[misc]
    """models/NAME: checkpoint -> evaluation -> version -> exports -> promotion -> deployment. See `ModelDefinition`."""

    def __init__(self, definition: ModelDefinition) -> None:
        self.definition = definition

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return ModelDefinition

    @classmethod
    def load(cls, attributes: ModelDefinition, context: dg.ComponentLoadContext) -> Self:
        Recipe.named(attributes.recipe)  # report a missing or broken recipe when the graph is loaded, not when a run starts
        return cls(attributes)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return dg.Definitions(assets=build_model_assets(self.definition))


def build_model_assets(model: ModelDefinition) -> list[dg.AssetsDefinition]:
    """Return all assets of a model; a partition is a tracking run."""
    partitions = dg.DynamicPartitionsDefinition(name=model.partitions_name)
    return [
        build_checkpoint(model, partitions),
        build_evaluation(model, partitions),
        build_version(model, partitions),
        build_exports(model, partitions),
        build_promotion(model, partitions),
        build_deployment(model, partitions),
    ]


def component_tree() -> dg.ComponentTree:
    """Load all definitions below `defs/`. `ComponentTree.for_project` needs a pyproject.toml, which wheels lack."""
    return dg.ComponentTree.from_module(import_module("hanzo_ml_assets.defs"), SOURCE)
