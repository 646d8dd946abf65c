"""Submission of a replay: all inputs are checked first, including the version behind a split."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recipes.contracts.job import Machine
from recipes.contracts.recipe import Recipe
from recipes.storage.line_selection import bitmap_uri
from recipes.storage.manifest import Artifact
from resources.errors import HanzoError
from resources.metadata.database import Database
from resources.replay.submission import FinishedRun, check_inputs, thread_count
from tests.resources.metadata.conftest import migrated_sqlite, sqlite_url
from tests.support.resources.splits import divided
from tests.support.resources.stored_versions import corpus, create, in_folder

__all__ = ["migrated_sqlite", "sqlite_url"]


def run_of(artifacts: dict[str, Artifact]) -> FinishedRun:
    """Return a finished run with only the fields that the check reads."""
    recipe = SimpleNamespace(base_model=SimpleNamespace(uri="b"))
    job: Any = SimpleNamespace(id="r1", artifact=artifacts.__getitem__)
    return FinishedRun(job=job, record=cast(Any, SimpleNamespace(recipe=recipe)), losses={}, incidents=(), machine=None)


@pytest.mark.parametrize(
    ("gpus", "processes", "threads"), [((), None, 2), ((), 2, 4), (("H200",), None, None)], ids=["one", "two", "gpu"]
)
def test_replay_uses_the_thread_count_of_the_original_run(
    gpus: tuple[str, ...], processes: int | None, threads: int | None
) -> None:
    """A run records one process's threads; processes of a node share the job's."""
    shape = {"hardware": {"gpus": 0}, "distributed": {"gpus_per_node": processes, "backend": "gloo"} if processes else None}
    recipe = Recipe.named("smollm2-135m-lora").changed(shape)
    machine = Machine(python="3.11.7", processor="EPYC", gpus=gpus, threads=2)
    record = cast(Any, SimpleNamespace(recipe=recipe))
    assert thread_count(FinishedRun(cast(Any, None), record, losses={}, incidents=(), machine=machine)) == threads


@pytest.mark.parametrize("lost", ["bitmap", "version"])
def test_replay_of_a_run_with_an_incomplete_split_is_refused(sqlite_url: str, tmp_path: Path, lost: str) -> None:
    database, store = Database(sqlite_url), in_folder(tmp_path)
    version, _ = create(database, store, tmp_path, "".join(corpus(100_000)))
    splits = divided(database, store, tmp_path, version)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_bytes(b"weights")
    base = store.publish(tmp_path / "base", "s3://hanzo-models/base/b", "base")
    run = run_of({**splits, "base": base})
    check_inputs(run, store)
    train = splits["train"]
    bitmap = bitmap_uri(train.uri, store.manifest(train).files[0].path)
    gone = bitmap if lost == "bitmap" else f"{version.artifact.uri}/manifest.json"
    store.remove(gone)
    with pytest.raises(HanzoError, match=r"run 'r1' cannot be replayed without its train split .*" + gone):
        check_inputs(run, store)
