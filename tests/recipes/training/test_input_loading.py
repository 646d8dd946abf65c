"""Inputs are hashed once before use: a base model of 144 GB takes a minute."""

from collections import Counter
from pathlib import Path

import pytest

from recipes.storage import artifact_store as store_module
from recipes.storage.manifest import FileRecord
from recipes.training.parallel.process_group import ProcessGroup
from recipes.training.run_setup import load_inputs
from tests.recipes.training.training_workspace import Place


@pytest.mark.parametrize(
    ("group", "base", "records"),
    [(ProcessGroup(), 1, 1), (ProcessGroup(local_size=2), 1, 2), (ProcessGroup(local_rank=1, local_size=2), 0, 1)],
    ids=["alone", "first of a node", "second of a node"],
)
def test_one_process_of_a_node_hashes_the_base_model(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: ProcessGroup, base: int, records: int
) -> None:
    """The first process hashes the records for all; each hashes them again for its rows."""
    job = place.job(tmp_path, {})
    load_inputs(job, place.recipe, ProcessGroup(), place.store)  # the base model is in the store from here on
    hashed: Counter[str] = Counter()
    what_is_broken = store_module.find_file_corruption

    def counted(folder: Path, file: FileRecord) -> str | None:
        hashed[file.path] += 1
        return what_is_broken(folder, file)

    monkeypatch.setattr(store_module, "find_file_corruption", counted)
    material = load_inputs(job, place.recipe, group, place.store)
    assert material.folder == place.store.locate_fetched(material.base, Path(job.cache_dir))
    assert (hashed["model.safetensors"], hashed["records.jsonl"]) == (base, 2 * records)  # of two splits
