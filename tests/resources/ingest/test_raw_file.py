"""Decompression bombs: refused, while legitimate compressed data is read in bounded memory."""

import gzip
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from resources.ingest.columnar import read_arrow, read_parquet
from resources.ingest.decompression_bomb import ALWAYS_ALLOWED_BYTES, exceeds_expansion_limit
from resources.ingest.memory_sizes import (
    group_columns,
    max_batch_rows,
    max_dictionary_value_bytes,
    max_shared_value_bytes,
    parse_page_header,
    uncompressed_size,
)
from resources.ingest.problems import Problem
from tests.support.resources.dataset_versions import Place
from tests.support.resources.record_files import packed_zstd, place

__all__ = ["place"]  # a fixture
LONG = "x" * (256 << 10)
ROWS = 512
REFUSED = "unpacks to more than 200 times its size: if it is data all the same, unpack it and send it as it is"


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the fixed allowance for unpacked data to 64 KB."""
    monkeypatch.setattr("resources.ingest.decompression_bomb.ALWAYS_ALLOWED_BYTES", 1 << 16)


def test_expansion_limit_has_a_fixed_allowance_and_a_ratio() -> None:
    assert not exceeds_expansion_limit(ALWAYS_ALLOWED_BYTES, 1)
    assert exceeds_expansion_limit(ALWAYS_ALLOWED_BYTES + 1, 1)
    assert not exceeds_expansion_limit(100 * ALWAYS_ALLOWED_BYTES, ALWAYS_ALLOWED_BYTES)
    assert exceeds_expansion_limit(201 * ALWAYS_ALLOWED_BYTES, ALWAYS_ALLOWED_BYTES)


@pytest.mark.parametrize("pack", [gzip.compress, packed_zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize(
    ("format", "line"), [("jsonl", b'{"a": 1}\n'), ("jsonl", b"\n"), ("csv", b"1\n"), ("text", b"one\n")]
)
@pytest.mark.usefixtures("little")
def test_compressed_file_beyond_the_expansion_limit_is_refused(
    place: Place, format: str, line: bytes, pack: Callable[[bytes], bytes]
) -> None:
    packed = pack(line * (1 << 17))
    refusal = place.refusal(packed, format=format)
    assert f"raw.jsonl {REFUSED}" in refusal


def digits(rows: int, columns: int, name: str) -> bytes:
    """Return a table with a digit in each cell, mostly the same."""
    random = Random(1)
    lines = [[name.format(number) for number in range(columns)]]
    lines += [random.choices("0123", (40, 1, 1, 1), k=columns) for _ in range(rows)]
    return "\n".join(map(",".join, lines)).encode()


@pytest.mark.parametrize("pack", [gzip.compress, packed_zstd, bytes], ids=["gzip", "zstd", "as it is"])
@pytest.mark.usefixtures("little")
def test_repeated_column_names_do_not_count_as_expansion(place: Place, pack: Callable[[bytes], bytes]) -> None:
    """Regression: a wide table of digits was refused because its records repeat the column names."""
    table = digits(100, 1000, "measured at station {} of the eastern valleys")
    packed = pack(table)
    version, _ = place.create(packed, format="csv")
    assert version.num_records == 100
    assert version.artifact.size_bytes > 20 * len(table), "the names"
    assert packed == table or version.artifact.size_bytes > 200 * len(packed)


@pytest.mark.usefixtures("little")
def test_column_names_far_longer_than_their_values_are_refused(place: Place) -> None:
    """An upload of a few MB would become hundreds of GB of records."""
    refusal = place.refusal(digits(400, 10, "{}" + "x" * 2000), format="csv")
    assert (
        "raw.jsonl has names of columns that make its records more than 200 times as large as it is: shorten them" in refusal
    )


def write_constant(path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([1] * (4 << 20), pa.int8())}), path)


def write_shared(path: Path, *, nested: bool = False, fixed: bool = False) -> None:
    """Write a text that is stored once and referenced by each row."""
    texts = pa.array([LONG.encode()] * ROWS, pa.binary(len(LONG))) if fixed else pa.array([LONG] * ROWS)
    column = pa.StructArray.from_arrays([texts], ["text"]) if nested else texts
    pq.write_table(pa.table({"a": column}), path, compression="zstd", dictionary_pagesize_limit=1 << 30)


@pytest.mark.parametrize("write", [write_constant, write_shared])
@pytest.mark.usefixtures("little")
def test_parquet_file_beyond_the_expansion_limit_is_refused(place: Place, write: Callable[[Path], None]) -> None:
    path = place.folder / "small.parquet"
    write(path)
    assert path.stat().st_size < 20_000
    assert f"small.parquet {REFUSED}" in place.refusal(path, format="parquet")


def write_arrow(path: Path, kind: str, column: pa.Array, compression: str | None = "zstd", **options: Any) -> pa.Table:
    table = pa.table({"a": column})
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression, **options)) as out:
        out.write_table(table)
    return table


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("shape", ["values", "nested", "dictionary"])
@pytest.mark.usefixtures("little")
def test_arrow_file_beyond_the_expansion_limit_is_refused_before_unpacking(place: Place, kind: str, shape: str) -> None:
    """A batch is unpacked as a whole: 340 KB would take 10 GB."""
    values = pa.array([1] * (4 << 20), pa.int8())
    packed = {
        "values": values,
        "nested": pa.ListArray.from_arrays([0, len(values)], pa.StructArray.from_arrays([values], ["n"])),
        "dictionary": pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), ["x" * len(values)]),
    }
    path = place.folder / "small.arrow"
    write_arrow(path, kind, packed[shape])
    assert path.stat().st_size < 20_000
    before = pa.total_allocated_bytes()
    with path.open("rb") as stream:
        assert [item.reason for item in read_arrow(stream) if isinstance(item, Problem)] == [REFUSED]
        assert pa.total_allocated_bytes() - before < 1 << 20
    assert f"small.arrow {REFUSED}" in place.refusal(path, format="arrow")


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
@pytest.mark.parametrize("legacy", [False, True])
def test_uncompressed_size_of_an_arrow_file_is_that_of_its_buffers(
    tmp_path: Path, kind: str, compression: str | None, legacy: bool
) -> None:
    column = pa.array([f"{number % 7}" * 1000 for number in range(300)])
    table = write_arrow(tmp_path / "a", kind, column, compression, use_legacy_format=legacy)
    with (tmp_path / "a").open("rb") as stream:
        size = uncompressed_size(stream)
        assert sum(isinstance(row, dict) for row in read_arrow(stream)) == 300
    assert size == 0 if compression is None else abs(size - table.nbytes) < 1000


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_damaged_arrow_file_is_refused_or_read(tmp_path: Path, kind: str) -> None:
    """An uncaught error is never acceptable."""
    write_arrow(tmp_path / "a", kind, pa.array([["word", None]] * 50), None)
    whole = (tmp_path / "a").read_bytes()
    for position in range(0, len(whole), 5):
        (tmp_path / "b").write_bytes(whole[:position] + bytes([whole[position] ^ 0xA5]) + whole[position + 1 :])
        with (tmp_path / "b").open("rb") as stream:
            assert list(read_arrow(stream))


def test_parquet_file_with_a_damaged_footer_is_refused_or_read(tmp_path: Path) -> None:
    """Reading some column metadata before the reader is created crashes the process."""
    pq.write_table(pa.table({"a": [["word", None]] * 5}), tmp_path / "a", store_schema=False)
    whole = (tmp_path / "a").read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    for position in range(len(whole) - 8 - length, len(whole) - 8):
        damaged = whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        assert list(read_parquet(BytesIO(damaged)))


@pytest.mark.parametrize("shape", [{}, {"nested": True}, {"fixed": True}], ids=["text", "nested", "of one length"])
def test_text_shared_by_all_rows_is_not_held_once_per_row(
    tmp_path: Path, shape: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a file of 762 bytes took 6 GB of memory."""
    monkeypatch.setattr("resources.ingest.memory_sizes.MAX_HELD_BYTES", 8 << 20)
    write_shared(tmp_path / "shared", **shape)
    before, held, count = pa.total_allocated_bytes(), 0, 0
    with (tmp_path / "shared").open("rb") as stream:
        for row in read_parquet(stream):
            assert isinstance(row, dict)
            held, count = max(held, pa.total_allocated_bytes() - before), count + 1
    assert count == ROWS
    assert held < 40 << 20, f"{held} bytes of {ROWS * len(LONG)}"


@pytest.mark.parametrize(
    "written",
    [{}, {"compression": "none"}, {"compression": "zstd", "write_page_checksum": True}],
    ids=["snappy", "none", "zstd with a checksum"],
)
def test_short_texts_of_large_dictionaries_are_read_in_large_batches(tmp_path: Path, written: dict[str, Any]) -> None:
    """Regression: sizing batches by whole dictionaries read 5 rows at a time, 7 times slower."""
    texts = [f"{number:0100}" for number in range(4000)]
    columns: dict[str, Any] = {
        "text": texts,
        "again": texts,
        "id": pa.array([f"{n:08}".encode() for n in range(4000)], pa.binary(8)),
    }
    pq.write_table(pa.table(columns), tmp_path / "wide", **written)
    group = pq.read_metadata(tmp_path / "wide").row_group(0)
    with (tmp_path / "wide").open("rb") as stream:
        assert [max_shared_value_bytes(column, stream) for column in group_columns(group)] == [
            4000 * 104,
            4000 * 104,
            4000 * 8,
        ]
        assert [max_dictionary_value_bytes(column, stream) for column in group_columns(group)] == [100, 100, 8]


def test_batch_size_follows_the_longest_text_of_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": ["x" * 1000, *(f"{number:0100}" for number in range(4000))]}), tmp_path / "wide")
    group = pq.read_metadata(tmp_path / "wide").row_group(0)
    with (tmp_path / "wide").open("rb") as stream:
        for held, rows in ((1 << 30, 512), (512_000, 512), (100_000, 100), (999, 1)):
            monkeypatch.setattr("resources.ingest.memory_sizes.MAX_HELD_BYTES", held)
            assert max_batch_rows(group, stream, 512) == rows


def test_long_text_among_short_ones_of_a_dictionary_is_read_within_memory(tmp_path: Path) -> None:
    """Regression: sizing batches by the mean text length loaded 512 copies of the long one."""
    words = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), [LONG, *map(str, range(5000))])
    table = pa.table({"text": words})
    with pa.ipc.new_file(tmp_path / "words", table.schema) as out:
        out.write_table(table)
    with (tmp_path / "words").open("rb") as stream:
        tracemalloc.start()
        count = sum(len(row["text"]) == len(LONG) for row in read_arrow(stream) if isinstance(row, dict))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert count == ROWS
    assert used < 40 << 20, f"{used} bytes of {ROWS * len(LONG)}"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes([0x15, 4, 0x15, 0x8A, 0x80, 0x80, 0x0A]), (2, 10_485_765)),
        (bytes([0x15, 0, 0x15, 2]), (0, 1)),
        (b"", (-1, 0)),
        (b"PAR1", (-1, 0)),
        (bytes([0x15, 4, 0x15]), (2, 0)),
    ],
)
def test_page_kind_and_size_are_parsed_from_its_header(data: bytes, expected: tuple[int, int]) -> None:
    assert parse_page_header(data) == expected
