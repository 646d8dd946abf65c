"""The order of samples: each once an epoch; what is skipped is what the bad steps had seen, however often that happens."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from recipes.training.samples import SampleOrder, SamplesOfRun


def test_each_epoch_has_each_row_once_in_another_order() -> None:
    ids = list(islice(SampleOrder(10, seed=1).ids(), 20))
    assert sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))
    assert ids[:10] != ids[10:]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=4), st.integers(1, 9))
def test_a_rollback_leaves_out_exactly_the_samples_of_its_steps(rollbacks: list[tuple[int, int]], rows: int) -> None:
    skipped: tuple[tuple[int, int], ...] = ()
    for before, count in rollbacks:
        samples = SamplesOfRun(SampleOrder(rows, 3, skipped), per_step=2, steps=40)
        seen = list(samples)
        skipped = (*skipped, samples.positions_of_steps(before + 1, before + count))
        after = list(SamplesOfRun(SampleOrder(rows, 3, skipped), per_step=2, steps=30))
        assert after == (seen[: 2 * before] + seen[2 * (before + count) :])[:60]
