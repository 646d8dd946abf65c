"""A dataset version with a trained model and a child version."""

from recipes.contracts.dataset_formats import Format
from resources.ingest.new_version import NewVersion
from resources.ingest.source_files import local_files
from resources.ingest.version_creation import create_from_files
from resources.metadata.datasets import DatasetVersion
from tests.support.resources.lineage import World, rows


def made_into_a_model_and_a_child(world: World) -> DatasetVersion:
    """Create a dataset version with a trained and exported model and a child version."""
    version = world.create(rows(40))
    world.model("m", "r1", world.run("r1", version, world.split(version)))
    path = world.folder / "child.jsonl"
    path.write_text('{"a": 1}\n')
    child = NewVersion("child", "jsonl", "u", "default", transform="cut", parents=[version.reference])
    create_from_files(world.database, world.store, child, local_files(path, Format.JSONL))
    return version
