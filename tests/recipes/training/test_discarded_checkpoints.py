"""A returning machine discards checkpoints that a recovery discarded during its absence."""

from pathlib import Path

import pytest

from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.job import StoreAddress
from recipes.contracts.recovery_log import Diverged
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.training.recovery import DIVERGENCES_FACT, discard_diverged_checkpoints
from tests.recipes.training.training_workspace import saved


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointManager:
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "c"}))
    return CheckpointManager(tmp_path / "machine", store, "s3://hanzo-ml/checkpoints/r", 9)


def at(step: int, way: str = ".") -> Diverged:
    return Diverged(step=step, noticed=step + 2, reason="nan", way=way, rolled_back_to=None, skipped=(1, 2))


@pytest.mark.parametrize(
    ("known", "diverged", "stay"),
    [
        (0, [], [2, 4, 6]),
        (0, [at(7)], [2, 4]),
        (0, [at(6)], [2, 4]),
        (0, [at(5)], [2]),
        (0, [at(1)], []),
        (1, [at(5)], [2, 4, 6]),
        (1, [at(3), at(7)], [2, 4]),
        (2, [at(3), at(7)], [2, 4, 6]),
        (0, [at(9), at(5)], [2]),
        (None, [at(5)], [2, 4, 6]),
        (0, [at(5, "from-2")], [2, 4, 6]),
    ],
)
def test_checkpoints_discarded_by_a_recovery_are_removed_on_returning_machine(
    checkpoints: CheckpointManager,
    capsys: pytest.CaptureFixture[str],
    known: int | None,
    diverged: list[Diverged],
    stay: list[int],
) -> None:
    """Checkpoints saved after the recovery are kept, and so are those without its metadata."""
    saved(checkpoints, 2, 4, 6, facts=None if known is None else {DIVERGENCES_FACT: known})
    capsys.readouterr()
    discard_diverged_checkpoints(checkpoints.folder, diverged)
    assert checkpoints.local_steps() == stay[::-1]
    assert capsys.readouterr().out.count("discarded by a recovery while this machine was away") == 3 - len(stay)


def test_discarding_applies_only_to_the_branch_of_the_divergence(checkpoints: CheckpointManager) -> None:
    way = checkpoints.branch("from-2", 2)
    further = way.branch("from-4", 4)
    for one in (checkpoints, way, further):
        saved(one, 6, facts={DIVERGENCES_FACT: 0})
    discard_diverged_checkpoints(checkpoints.folder, [at(5, "from-2/from-4")])
    assert [one.local_steps() for one in (checkpoints, way, further)] == [[6], [6], []]
    discard_diverged_checkpoints(checkpoints.folder, [at(9), at(5, "from-2")])
    assert [one.local_steps() for one in (checkpoints, way, further)] == [[6], [], []]


def test_unrenamed_checkpoint_is_discarded_and_unreadable_one_is_kept(
    checkpoints: CheckpointManager,
) -> None:
    """Otherwise the search for the newest checkpoint would complete its rename."""
    saved(checkpoints, 4, 6, facts={DIVERGENCES_FACT: 0})
    (checkpoints.folder / "6").rename(checkpoints.folder / ".6.tmp")
    (checkpoints.folder / "4" / MANIFEST_FILE).write_text("{")
    discard_diverged_checkpoints(checkpoints.folder, [at(5)])
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["4"]


def test_discarding_without_local_checkpoints_does_nothing(tmp_path: Path) -> None:
    discard_diverged_checkpoints(tmp_path / "none", [at(5)])
    assert not (tmp_path / "none").exists()
