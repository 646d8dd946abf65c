"""Disk partitions return rows by partition in insertion order, from memory or from disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.records.disk_partitions import Partitions, Scratch, build_rows

KIND = np.dtype([("key", "<u8"), ("place", "<u8")])
HELD = [48, 1 << 20]
"""Bytes of three rows, or of more than all of them."""


@pytest.fixture(params=[2, 1000], autouse=True)
def fan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit open partitions to fewer, or to more, than there are."""
    monkeypatch.setattr("recipes.records.disk_partitions.MAX_OPEN_PARTITIONS", request.param)


@pytest.mark.parametrize("held_bytes", HELD)
def test_partition_returns_its_rows_in_insertion_order(tmp_path: Path, held_bytes: int) -> None:
    draw = np.random.default_rng(1)
    with Partitions(tmp_path / "rows", KIND, 5, held_bytes) as partitions:
        numbers = draw.integers(0, 4, 100)  # the last partition stays empty
        for begin in range(0, 100, 7):
            chosen = numbers[begin : begin + 7]
            partitions.add(chosen, build_rows(KIND, chosen * 10, begin + np.arange(len(chosen))))
        for _ in range(2):  # reading can be repeated
            found = [np.concatenate([np.zeros(0, KIND), *partitions.pieces(number)]) for number in range(5)]
            assert [rows["place"].tolist() for rows in found] == [np.flatnonzero(numbers == n).tolist() for n in range(5)]
            assert all((rows["key"] == 10 * number).all() for number, rows in enumerate(found))
        assert (tmp_path / "rows").is_dir() == (held_bytes == HELD[0])
    assert not (tmp_path / "rows").exists()


def test_partition_files_of_a_killed_process_are_not_read(tmp_path: Path) -> None:
    for _ in range(2):
        partitions = Scratch(tmp_path, 16).partitions("rows", KIND, 1)
        partitions.add(np.zeros(4), build_rows(KIND, np.arange(4), np.arange(4)))
    assert sum(map(len, partitions.pieces(0))) == 4


def test_oversized_partition_is_read_in_pieces(tmp_path: Path) -> None:
    with Partitions(tmp_path / "rows", KIND, 2, 160) as partitions:
        for begin in range(0, 1000, 10):
            partitions.add(np.ones(10), build_rows(KIND, np.zeros(10), begin + np.arange(10)))
        pieces = [*partitions.pieces(1)]
    assert max(map(len, pieces)) <= 20
    assert np.concatenate(pieces)["place"].tolist() == [*range(1000)]


def test_adding_rows_after_first_read_is_refused(tmp_path: Path) -> None:
    partitions = Partitions(tmp_path, KIND, 1, 1000)
    assert not [*partitions.pieces(0)]
    with pytest.raises(AssertionError):
        partitions.add(np.zeros(1), build_rows(KIND, [1], [1]))


def test_reading_more_values_than_places_is_refused(tmp_path: Path) -> None:
    with Scratch(tmp_path, 100).column("values", np.int8, 5, 0) as column, pytest.raises(IndexError):
        [*column.runs([3, 3])]


def test_partition_file_opens_are_bounded_for_many_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: all partitions were opened each time memory was full."""
    monkeypatch.setattr("recipes.records.disk_partitions.MAX_OPEN_PARTITIONS", 16)
    opened: list[str] = []
    does = Path.open

    def counting(self: Path, mode: str = "r", *rest: Any) -> Any:
        opened.append(mode)
        return does(self, mode, *rest)

    monkeypatch.setattr(Path, "open", counting)
    count, held = 256, 500
    rows, random = count * held, np.random.default_rng(1)
    with Partitions(tmp_path / "rows", KIND, count, held * KIND.itemsize) as partitions:
        for begin in range(0, rows, held):
            numbers = random.integers(0, count, held)
            partitions.add(numbers, build_rows(KIND, numbers, begin + np.arange(held)))
        found = np.concatenate([piece for number in range(count) for piece in partitions.pieces(number)])
    assert np.array_equal(np.sort(found["place"]), np.arange(rows))
    assert (np.diff(found["key"].astype(np.int64)) >= 0).all()
    assert opened.count("ab") < 4 * count * 16, "twice the root for each time that memory is full, in either round"


def test_hashes_are_assigned_to_partitions_evenly_and_in_order(tmp_path: Path) -> None:
    partitions = Partitions(tmp_path, KIND, 7, 1000)
    hashes = np.sort(np.random.default_rng(1).integers(0, 1 << 64, 10_000, np.uint64, endpoint=False))
    numbers = partitions.partition_numbers(np.array([0, *hashes, (1 << 64) - 1], np.uint64))
    assert (np.diff(numbers) >= 0).all() and numbers[0] == 0 and numbers[-1] == 6
    assert np.bincount(numbers).min() > 1000


@given(
    st.dictionaries(st.integers(0, 59), st.integers(-5, 5)),
    st.lists(st.integers(0, 20), max_size=8),
    st.sampled_from(HELD),
)
def test_column_values_are_read_in_place_order(
    tmp_path_factory: pytest.TempPathFactory, values: dict[int, int], lengths: list[int], held_bytes: int
) -> None:
    with Scratch(tmp_path_factory.mktemp("column"), held_bytes).column("values", np.int8, 60, 9) as column:
        for place, value in values.items():
            column.assign(np.array([place], np.uint64), value)
        expected = [values.get(place, 9) for place in range(60)]
        end, wanted = 0, list[list[int]]()
        for length in lengths:
            wanted.append(expected[end : end + length])
            end += len(wanted[-1])
        found = [run.tolist() for run in column.runs(map(len, wanted))]
        assert found == wanted
        assert column.reader().take(60).tolist() == expected
