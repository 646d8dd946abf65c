"""Metric requests of a killed process that arrive after the run has resumed."""

import shutil
from pathlib import Path

from recipes.storage.artifact_store import MANIFEST_FILE
from tests.recipes.training.training_workspace import CHECKPOINTS, Place, facts


def test_late_metric_request_does_not_corrupt_checkpoint_of_the_same_step(place: Place, tmp_path: Path) -> None:
    """The late points carry other timestamps.

    They corrupted the run's newest checkpoint in the store, and a new machine fell back to an older one.
    """
    work, killed = tmp_path / "late-request", tmp_path / "of-the-killed"
    uri = CHECKPOINTS.format(work.name)
    expected = facts(place.train(work, max_steps=4))
    shutil.move(work / "checkpoints" / "4", killed)
    shutil.rmtree(work)
    place.store.delete(uri)
    place.train(work, max_steps=4)
    for file in killed.rglob("*"):
        if file.is_file() and file.name != MANIFEST_FILE:
            place.store.put_file(f"{uri}/4/{file.relative_to(killed)}", file)
    shutil.rmtree(work)
    found = facts(place.train(work, max_steps=4))
    assert (found.resumed_from, found.losses) == (4, expected.losses)
