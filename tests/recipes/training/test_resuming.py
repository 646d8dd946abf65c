"""Where a run goes on: the best checkpoint outlives the last few, and going back to one loses none."""

import shutil
from pathlib import Path

import pytest

from recipes.results import TrainingFacts
from recipes.schema import BadConfiguration
from tests.recipes.training.place import Place


def losses(result: object) -> dict[int, float | None]:
    return TrainingFacts.model_validate(result.facts).losses  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_best_checkpoint_stays_beside_the_last_and_a_run_goes_back_to_it(place: Place, tmp_path: Path) -> None:
    """It learns nothing that float32 could show: of equal losses the first is the best."""
    work = tmp_path / "back"
    policy = {"interval": "1h", "interval_steps": 1, "keep_last": 2}
    first = place.train(work, eval_steps=5, learning_rate=1e-15, checkpoint=policy)
    checkpoints = place.checkpoints(work)
    best = checkpoints.best()
    assert best is not None and best[0] == 5
    assert checkpoints.local_steps() == checkpoints.stored_steps() == [8, 7, best[0]]

    again = place.train(work, eval_steps=5, learning_rate=1e-15, checkpoint={**policy, "resume_from": "best"})
    assert TrainingFacts.model_validate(again.facts).resumed_from == best[0]
    assert again.artifacts["adapter"].digest == first.artifacts["adapter"].digest
    assert losses(again) == losses(first)
    assert checkpoints.stored_steps() == [8, 7, best[0]]
    way = checkpoints.below(f"from-{best[0]}")
    assert way.stored_steps()[0] == 8

    with pytest.raises(BadConfiguration, match=r"there is no valid checkpoint 4. There are: 5, 7, 8"):
        place.train(work, eval_steps=5, learning_rate=1e-15, checkpoint={**policy, "resume_from": 4})
    # Killed on the new way, the run goes on there.
    way.discard_from(8)
    after = place.train(work, eval_steps=5, learning_rate=1e-15, checkpoint={**policy, "resume_from": "best"})
    assert TrainingFacts.model_validate(after.facts).resumed_from == 7


@pytest.mark.slow
def test_a_machine_that_has_nothing_goes_on_from_a_compressed_upload(place: Place, tmp_path: Path) -> None:
    work = tmp_path / "compressed"
    policy = {"interval": "1h", "interval_steps": 1, "keep_last": 2, "compression": "zstd"}
    first = place.train(work, checkpoint=policy)
    checkpoints = place.checkpoints(work)
    assert any(uri.endswith("optimizer.pt.zst") for uri in place.store.list(f"{checkpoints.uri}/8"))
    checkpoints.discard_from(8)
    shutil.rmtree(work)
    again = place.train(work, checkpoint=policy)
    assert TrainingFacts.model_validate(again.facts).resumed_from == 7
    assert again.artifacts["adapter"].digest == first.artifacts["adapter"].digest
    assert losses(again) == losses(first)
