"""All classes come to as many training records as the largest; who stands there once more is drawn, with few in memory."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipes.partitions import Scratch
from recipes.preparation.hashing import mixed
from recipes.preparation.oversampling import NO_CLASS, oversample

HELD_BYTES = 200
RANGE = 11


@given(st.integers(0, 1 << 32), st.integers(0, 150), st.integers(1, 5), st.integers(1, 150), st.integers(0, 9))
def test_copies_are_those_of_the_lowest_numbers(seed: int, count: int, kinds: int, questions: int, salt: int) -> None:
    random = np.random.default_rng(seed)
    classes = np.minimum(random.geometric(0.5, count) - 1, kinds) - (random.random(count) < 0.3) * 1
    classes = np.where(classes < 0, NO_CLASS, classes).astype(np.int64)
    draws = random.integers(0, 1 << 64, questions, np.uint64)[random.integers(0, questions, count)]
    parts = [slice(begin, begin + RANGE) for begin in range(0, count, RANGE)]
    with TemporaryDirectory() as folder:
        members = [(classes[part], draws[part]) for part in parts]
        with oversample(lambda: members, count, salt, Scratch(Path(folder), HELD_BYTES)) as copies:
            runs = copies.runs((known for known, _ in members), [len(known) for known, _ in members])
            found = np.concatenate([np.zeros(0, np.int32), *runs])
            added = [copies.added(number) for number in range(kinds + 1)]
        assert not [*Path(folder).iterdir()]
    expected = np.ones(count, np.int32)
    sizes = np.bincount(classes[classes >= 0], minlength=kinds + 1)
    for number, size in enumerate(sizes.tolist()):
        if size:
            each, rest = divmod(int(sizes.max()), size)
            places = np.flatnonzero(classes == number)
            expected[places] = each
            expected[places[np.argsort(mixed(draws[places], salt), kind="stable")[:rest]]] += 1
    assert (found == expected).all()
    assert added == [int(sizes.max()) - size if size else 0 for size in sizes.tolist()]
    assert {int(found[classes == number].sum()) for number in range(kinds + 1)} <= {0, int(sizes.max())}
