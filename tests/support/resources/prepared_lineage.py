"""A lineage graph with prepared data."""

from pathlib import Path

from recipes.contracts.job import Hardware, Job, Program, Result
from recipes.contracts.parameters import PrepareParameters
from recipes.prepare import prepare
from resources.datasets.prepared_versions import Derivation, add_prepared_version, output_uris
from resources.metadata.datasets import DatasetVersion
from tests.support.resources.lineage import World

PARAMETERS = {"filter": {"dedup": True}, "augment": {"mask_pii": True, "oversample_minority": True}}


def prepared(world: World, version: DatasetVersion, name: str, **parameters: object) -> tuple[DatasetVersion, Result]:
    place = f"s3://hanzo-ml/datasets/{name}/prepared/x"
    wanted = PrepareParameters.model_validate(PARAMETERS | parameters)
    job = Job(
        id=f"prepare-{name}",
        program=Program.PREPARE,
        inputs={"dataset": version.artifact},
        parameters=wanted.model_dump(mode="json"),
        outputs=output_uris(place),
        result_uri=f"{place}/result.json",
        store=world.store.address,
        work_dir=str(world.folder / "work" / name),
        cache_dir=str(world.folder / "cache"),
        hardware=Hardware(cpu=2),
    )
    result = prepare(job, world.store, Path(job.work_dir))
    assert result is not None
    made, is_new = add_prepared_version(world.database, world.store, Derivation(version, name, wanted, "u"), result)
    assert is_new
    return made, result
