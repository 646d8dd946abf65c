"""Splits of a dataset version."""

import os
from pathlib import Path
from unittest import mock

from recipes.contracts.job import Job, Program
from recipes.preparation.split_assignment import SPLITS
from recipes.split import split_dataset
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.lineage.edges import record_artifact
from resources.metadata.database import Database
from resources.metadata.datasets import DatasetVersion
from tests.support.s3_server import VARIABLES


def divided(database: Database, store: Store, folder: Path, version: DatasetVersion) -> dict[str, Artifact]:
    """Split a version as the stack does and return the splits."""
    place = f"{version.storage_path}splits/x"
    job = Job(
        id="split",
        program=Program.SPLIT,
        inputs={"dataset": version.artifact},
        outputs={split: f"{place}/{split}" for split in SPLITS},
        result_uri=f"{place}/result.json",
        store=store.address,
        work_dir=str(folder / "work"),
        cache_dir=str(folder / "cache"),
    )
    with mock.patch.dict(os.environ, VARIABLES):  # the program reads the store's keys there
        found = split_dataset(job, store, folder / "work").artifacts
    assert not (folder / "cache").exists(), "it is read where it lies"
    with database.write() as connection:
        for artifact in found.values():
            record_artifact(connection, artifact, store.manifest(artifact))
    return found
