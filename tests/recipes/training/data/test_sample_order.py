"""The order of samples: each once per epoch, without the samples skipped by rollbacks."""

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.training.data.sample_order import NO_ROW, OptionalRows, ProcessSampler, RunSamples, SampleOrder


def test_each_epoch_has_each_row_once_in_another_order() -> None:
    ids = list(islice(SampleOrder(10, seed=1).ids(), 20))
    assert sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))
    assert ids[:10] != ids[10:]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=4), st.integers(1, 9))
def test_rollback_skips_the_samples_of_its_steps_and_their_rows_permanently(
    rollbacks: list[tuple[int, int]], rows: int
) -> None:
    """If more than half of the rows would be lost, only these samples are skipped."""
    skipped: tuple[tuple[int, int], ...] = ()
    whole = list(islice(SampleOrder(rows, 3).ids(), 40 * rows + 200))
    for before, count in rollbacks:
        samples = RunSamples(SampleOrder(rows, 3, skipped), per_step=2, steps=40)
        seen = list(samples)
        first, stop = samples.step_positions(before + 1, before + count)
        assert [seen[2 * before], seen[2 * (before + count) - 1]] == [whole[first], whole[stop - 1]]
        skipped = (*skipped, (first, stop))
        after = list(RunSamples(SampleOrder(rows, 3, skipped), per_step=2, steps=30))
        assert after[: 2 * before] == seen[: 2 * before]
        assert after == kept(whole, rows, skipped)[:60]


def kept(whole: list[int], rows: int, skipped: tuple[tuple[int, int], ...]) -> list[int]:
    """Return the expected samples, computed one by one."""
    positions = {position for first, stop in skipped for position in range(first, stop)}
    found = []
    for position, row in enumerate(whole):
        gone = {whole[before] for before in positions if before // rows < position // rows}
        if position not in positions and not (row in gone and 2 * len(gone) <= rows):
            found.append(row)
    return found


def test_skipped_row_does_not_return_in_later_epochs() -> None:
    samples = RunSamples(SampleOrder(10, seed=1), per_step=2, steps=50)
    order = SampleOrder(10, seed=1, skipped=(samples.step_positions(2, 3),))
    bad = list(samples)[2:6]
    seen = list(islice(order.ids(), 60))
    assert not {*bad} & {*seen} and [seen.count(row) for row in {*seen}] == [10] * 6


def test_data_position_is_that_of_the_next_sample() -> None:
    """Steps use 4 of 10 rows; the samples of steps 3 and 4 are skipped."""
    samples = RunSamples(SampleOrder(10, seed=1), per_step=4, steps=9)
    found = [tuple(samples.position_after(step).values()) for step in range(6)]
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    skipping = RunSamples(SampleOrder(10, seed=1, skipped=((8, 16),)), per_step=4, steps=9)
    assert skipping.position_after(1) == samples.position_after(1) and skipping.position_after(2) == samples.position_after(
        4
    )


def test_model_parallel_processes_get_the_same_micro_batches() -> None:
    """Accelerate assigns micro-batches to processes in turn."""
    samples = RunSamples(SampleOrder(60, seed=2), per_step=12, steps=4)
    dealt = list(ProcessSampler(samples, places=12, batch=3, processes=2))
    assert len(dealt) == len(ProcessSampler(samples, places=12, batch=3, processes=2))
    batches = [dealt[first : first + 3] for first in range(0, len(dealt), 3)]
    hands = [[row for batch in batches[process::4] for row in batch] for process in range(4)]
    assert hands[0] == hands[1] and hands[2] == hands[3]
    assert sorted(hands[0] + hands[2]) == sorted(samples)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(1, 2))
def test_each_step_has_its_samples_once_on_any_number_of_processes(
    rows: int, processes: int, most: int, together: int
) -> None:
    """`together` processes compute the same micro-batches; placeholders come last in a step."""
    batch = min(most, -(-rows // processes))
    times = -(-rows // (batch * processes))
    samples = RunSamples(SampleOrder(60, seed=2), per_step=rows, steps=3)
    dealt = list(ProcessSampler(samples, batch * times * processes, batch, together))
    assert len(dealt) == len(ProcessSampler(samples, batch * times * processes, batch, together))
    batches = [dealt[first : first + batch] for first in range(0, len(dealt), batch)]
    hands = [batches[process :: processes * together] for process in range(processes * together)]
    assert {len(hand) for hand in hands} == {3 * times}, "all compute as often"
    seen = []
    for step in range(3):
        places = [row for turn in range(times) for hand in hands[::together] for row in hand[step * times + turn]]
        assert places == [*places[:rows], *[NO_ROW] * (len(places) - rows)] and NO_ROW not in places[:rows]
        seen += places[:rows]
    assert seen == list(samples)


def test_placeholder_row_is_none() -> None:
    rows = OptionalRows(["a", "b"])
    assert (len(rows), rows[0], rows[1], rows[NO_ROW]) == (2, "a", "b", None)
