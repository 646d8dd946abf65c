"""Oversampling raises every class to the largest one's size, drawn in bounded memory."""

import tracemalloc
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipes.preparation.oversampling import NO_CLASS, oversample
from recipes.preparation.shuffle_plan import mix_bits
from recipes.records.disk_partitions import Scratch

HELD_BYTES = 200
RANGE = 11


@given(st.integers(0, 1 << 32), st.integers(0, 150), st.integers(1, 5), st.integers(1, 150), st.integers(0, 9))
def test_oversampling_repeats_the_records_with_the_lowest_draws(
    seed: int, count: int, kinds: int, questions: int, salt: int
) -> None:
    random = np.random.default_rng(seed)
    classes = np.minimum(random.geometric(0.5, count) - 1, kinds) - (random.random(count) < 0.3) * 1
    classes = np.where(classes < 0, NO_CLASS, classes).astype(np.int64)
    draws = random.integers(0, 1 << 64, questions, np.uint64)[random.integers(0, questions, count)]
    parts = [slice(begin, begin + RANGE) for begin in range(0, count, RANGE)]
    with TemporaryDirectory() as folder:
        members = [(classes[part], draws[part]) for part in parts]
        with oversample(partial(list, members), count, salt, Scratch(Path(folder), HELD_BYTES)) as copies:
            runs = copies.runs((known for known, _ in members), [len(known) for known, _ in members])
            found = np.concatenate([np.zeros(0, np.int32), *runs])
            added = [copies.count_added(number) for number in range(kinds + 1)]
        assert not [*Path(folder).iterdir()]
    expected = np.ones(count, np.int32)
    sizes = np.bincount(classes[classes >= 0], minlength=kinds + 1)
    for number, size in enumerate(sizes.tolist()):
        if size:
            each, rest = divmod(int(sizes.max()), size)
            places = np.flatnonzero(classes == number)
            expected[places] = each
            expected[places[np.argsort(mix_bits(draws[places], salt), kind="stable")[:rest]]] += 1
    assert (found == expected).all()
    assert added == [int(sizes.max()) - size if size else 0 for size in sizes.tolist()]
    assert {int(found[classes == number].sum()) for number in range(kinds + 1)} <= {0, int(sizes.max())}


def test_oversampling_memory_is_bounded_for_a_very_frequent_question(tmp_path: Path) -> None:
    """Regression: all its records, being in one partition, were held at once."""
    peaks = []
    for count in (20_000, 160_000):
        draws = np.random.default_rng(1).integers(0, 1 << 64, count, np.uint64)
        draws[::3] = 7
        classes = (np.arange(count) % 5 == 0).astype(np.int64)
        parts = [slice(begin, begin + 1000) for begin in range(0, count, 1000)]
        members = [(classes[part], draws[part]) for part in parts]
        tracemalloc.start()
        with oversample(partial(list, members), count, 1, Scratch(tmp_path, 1 << 16)) as copies:
            lengths = [len(known) for known, _ in members]
            total = sum(int(run.sum()) for run in copies.runs((known for known, _ in members), lengths))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert total == 2 * max(np.bincount(classes))
    assert peaks[1] < 1.5 * peaks[0], peaks
