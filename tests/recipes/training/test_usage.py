"""How fast a step was: tokens a second always, the share of the peak only where somebody stated the peak."""

from recipes.training.usage import Work, work_of_step
from tests.recipes.training.place import Place


def test_the_share_of_the_peak_is_told_where_the_peak_is_known() -> None:
    assert Work(1000, 4e12, 312e12).speed(0.1) == {"train/tokens_per_second": 10_000.0, "train/mfu": 4e13 / 312e12}
    assert Work(1000, 4e12, None).speed(0.5) == {"train/tokens_per_second": 2000.0}


def test_no_peak_is_invented_for_a_cpu(place: Place) -> None:
    work = work_of_step(place.recipe, place.folder / "model")
    assert work.tokens == 4 * 64 and work.flops and work.peak is None
