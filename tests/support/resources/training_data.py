"""Requests for the training data of a run."""

from resources.lineage.training_data import TrainingData, describe_training_data
from resources.metadata.registry.model_names import ModelKey
from tests.support.resources.lineage import World


def asked(world: World, name: str = "m") -> TrainingData:
    version = world.registry.read(ModelKey("default", name), 1)
    return describe_training_data(world.database, world.store, version, "default")
