"""Code version in a run's record: a checkout's commit, or that of the image."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from recipes.contracts.job import StoreAddress
from recipes.contracts.recipe import Recipe
from recipes.contracts.rendering import CURRENT_RENDERING, Rendering
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.installation import COMMIT_FILE, LOCK_FILE, NO_COMMIT
from resources.lineage.run_record import RECORD_FILE, RunRecord, read_environment, read_record

BUCKETS = {"datasets": "hanzo-ml-datasets", "checkpoints": "hanzo-ml-checkpoints", "models": "hanzo-models"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_environment_of_an_image_has_its_commit_and_lock(tmp_path: Path) -> None:
    """Regression: without git in the image, runs recorded `none` and could not be proved."""
    (tmp_path / COMMIT_FILE).write_text(f"{COMMIT}\n")
    (tmp_path / LOCK_FILE).write_text("torch==2\n")
    found = read_environment(tmp_path)
    assert (found.git_commit, found.git_dirty) == (COMMIT, False)
    assert found.lock_sha256 == hashlib.sha256(b"torch==2\n").hexdigest()


@pytest.mark.parametrize("text", [None, "none", "v1.2", ""])
def test_environment_without_a_known_commit_has_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / COMMIT_FILE).write_text(text)
    assert read_environment(tmp_path).git_commit == NO_COMMIT


def test_git_checkout_takes_precedence_over_the_commit_file(tmp_path: Path) -> None:
    (tmp_path / COMMIT_FILE).write_text(COMMIT)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    first = read_environment(tmp_path)
    assert first.git_commit not in (COMMIT, NO_COMMIT) and not first.git_dirty
    (tmp_path / COMMIT_FILE).write_text("other")
    assert read_environment(tmp_path).git_dirty


def test_record_of_another_release_is_rejected_with_a_clear_error(tmp_path: Path) -> None:
    """Regression: an unhandled validation error stopped the processing of all other jobs."""
    store = Store(StoreAddress(root=tmp_path.as_uri(), buckets=BUCKETS))
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / RECORD_FILE).write_text('{"of": "another release"}')
    record = store.publish(tmp_path / "record", "s3://hanzo-ml/runs/r/record", "run")
    with pytest.raises(BrokenArtifact, match=r"run\.json is no record that this release can read: 'run_id' is missing"):
        read_record(store, record)


def test_old_run_record_keeps_its_original_rendering(tmp_path: Path) -> None:
    """It is resumed and replayed with the original tokens."""
    recipe = Recipe.named("smollm2-135m-lora")
    environment = read_environment(tmp_path)
    new = RunRecord(run_id="r", model="m", dataset="d@1", recipe=recipe, seed=1, environment=environment)
    assert new.rendering is CURRENT_RENDERING
    assert RunRecord.model_validate_json(new.model_dump_json()) == new
    old = RunRecord.model_validate_json(new.model_dump_json(exclude={"rendering"}))
    assert old.rendering is Rendering.AS_STORED
    assert "rendering" not in old.model_dump(mode="json")
