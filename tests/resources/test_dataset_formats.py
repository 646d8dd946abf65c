"""Every format becomes records, counted and with a schema, without a loss that nobody is told of (rows B2, B12, B15)."""

import datetime
import decimal
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recipes.record_lines import record_lines
from recipes.schema import StoreAddress
from recipes.store import Store
from tests.resources.test_ingest import BUCKETS, Place

__all__ = ["BUCKETS", "Store", "StoreAddress"]
ROWS = [{"text": 'täst, "x"\n2', "n": 1, "score": 0.5, "ok": True}, {"text": "", "n": None, "score": 2.25, "ok": False}]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def packed_zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table)


def write_arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table)


def write_csv(path: Path) -> None:
    path.write_text('text,n,score,ok\n"täst, ""x""\n2",1,0.5,true\n"",,2.25,false\n', newline="")


def records(place: Place, path: Path, format: str, **more: Any) -> list[dict[str, Any]]:
    version, _ = place.create(path, format=format, name=f"of-{format}", **more)
    found = [json.loads(line) for line in record_lines(place.store, version.artifact)]
    assert version.num_records == len(found)
    return found


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "jsonl": ("jsonl", write_jsonl),
    "parquet": ("parquet", write_parquet),
    "arrow file": ("arrow", write_arrow_file),
    "arrow stream": ("arrow", write_arrow_stream),
    "csv": ("csv", write_csv),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_each_format_gives_the_same_records_and_the_same_schema(place: Place, writer: str) -> None:
    format, write = WRITERS[writer]
    write(place.folder / "data")
    assert records(place, place.folder / "data", format) == ROWS
    version, is_new = place.create(place.folder / "data", format=format, name=f"of-{format}")
    assert not is_new
    assert version.schema == {"n": "integer|null", "ok": "boolean", "score": "number", "text": "string"}
    assert (place.source(version) / "data").read_bytes() == (place.folder / "data").read_bytes()


@pytest.mark.parametrize("pack", [gzip.compress, packed_zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize("format", ["jsonl", "csv", "text"])
def test_compressed_files_are_read_and_kept_as_they_came(place: Place, format: str, pack: Callable[[bytes], bytes]) -> None:
    plain = {"jsonl": b'{"a": 1}\n' * 3, "csv": b"a\n1\n1\n1\n", "text": b"one\n\ntwo\r\nthree"}[format]
    path = place.folder / "packed"
    path.write_bytes(pack(plain))
    expected = [{"text": "one"}, {"text": "two"}, {"text": "three"}] if format == "text" else [{"a": 1}] * 3
    assert records(place, path, format) == expected


@pytest.mark.parametrize("pack", [gzip.compress, packed_zstd], ids=["gzip", "zstd"])
def test_a_compressed_file_that_breaks_off_is_refused(place: Place, pack: Callable[[bytes], bytes]) -> None:
    data = pack(b"".join(json.dumps({"n": number}).encode() + b"\n" for number in range(5000)))
    (place.folder / "packed").write_bytes(data[:-7])
    assert "packed is no whole " in place.refusal(place.folder / "packed")


def test_a_folder_is_all_its_files_of_the_format_in_the_order_of_their_names(place: Place) -> None:
    folder = place.folder / "many"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.jsonl").write_text('{"n": 3}\n')
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"n": 1}\n{"n": 2}\n'))
    (folder / "inner" / "c.jsonl.zst").write_bytes(packed_zstd(b'{"n": 4}\n'))
    (folder / "readme.txt").write_text("not a record")
    assert records(place, folder, "jsonl") == [{"n": number} for number in (1, 2, 3, 4)]


def test_types_that_json_has_not_have_one_documented_form(place: Place) -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, 0, 250_000)
    table = pa.table(
        {
            "money": pa.array([decimal.Decimal("1234567890123456789.10")], pa.decimal128(25, 2)),
            "day": pa.array([datetime.date(2024, 2, 29)]),
            "moment": pa.array([moment], pa.timestamp("ns")),
            "zoned": pa.array([moment.replace(tzinfo=datetime.UTC)], pa.timestamp("us", "UTC")),
            "took": pa.array([datetime.timedelta(seconds=90)]),
            "raw": pa.array([b"\x00\xff"]),
            "nested": pa.array([{"list": [decimal.Decimal("0.10")], "at": [moment]}]),
            "pairs": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "kind": pa.array(["a"]).dictionary_encode(),
            "big": pa.array([2**64 - 1], pa.uint64()),
        }
    )
    pq.write_table(table, place.folder / "typed")
    (row,) = records(place, place.folder / "typed", "parquet")
    assert row == {
        "money": "1234567890123456789.10",
        "day": "2024-02-29",
        "moment": "2024-02-29T12:30:00.250000",
        "zoned": "2024-02-29T12:30:00.250000Z",
        "took": "PT90S",
        "raw": "AP8=",
        "nested": {"list": ["0.10"], "at": ["2024-02-29T12:30:00.250000"]},
        "pairs": [["k", 1]],
        "kind": "a",
        "big": 2**64 - 1,
    }


REFUSED: dict[str, tuple[pa.Array, str]] = {
    "NaN": (pa.array([1.0, float("nan")]), "NaN or infinity in column 'x'"),
    "infinity in a list": (pa.array([[1.0], [float("-inf")]]), "NaN or infinity in column 'x'"),
    "NaN in a struct": (pa.array([{"a": float("nan")}]), "NaN or infinity in column 'x'"),
    "nanoseconds": (pa.array([1], pa.timestamp("ns")), "nanoseconds in column 'x'"),
    "an interval": (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "a column 'x' of type month_day_nano_interval"),
    "a year that no text has": (pa.array([10**18], pa.timestamp("s")), "column 'x' that has no form"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_form_in_json_is_refused_by_its_column(place: Place, what: str) -> None:
    column, reason = REFUSED[what]
    table = pa.table({"good": pa.array([1] * len(column)), "x": column})
    with pa.ipc.new_file(place.folder / "data", table.schema) as out:
        out.write_table(table)
    assert reason in place.refusal(place.folder / "data", format="arrow")


def test_two_columns_of_one_name_are_refused(place: Place) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
    pq.write_table(table, place.folder / "data")
    assert "two columns 'x'" in place.refusal(place.folder / "data", format="parquet")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1 no", b"ARROW1 neither", b"\x00" * 500])
def test_what_is_no_such_file_is_refused(place: Place, format: str, content: bytes) -> None:
    assert "that can be read" in place.refusal(content, format=format)


@pytest.mark.parametrize("format", ["parquet", "csv", "text"])
def test_no_records_are_refused_in_every_format(place: Place, format: str) -> None:
    path = place.folder / "none"
    if format == "parquet":
        pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path)
    else:
        path.write_bytes({"csv": b"a,b\n", "text": b"\n \n"}[format])
    assert "none is empty" in place.refusal(path, format=format)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "2"], [1, 2]),
        (["1", ""], [1, None]),
        (["1", "2.5"], [1.0, 2.5]),
        (["007", "10"], ["007", "10"]),
        (["1234567890123456789", "1"], ["1234567890123456789", "1"]),
        (["123456789012345678", "1"], [123456789012345678, 1]),
        (["123456789012345678", "0.5"], ["123456789012345678", "0.5"]),
        (["0.12345678901234567", "1"], ["0.12345678901234567", "1"]),
        (["true", "false"], [True, False]),
        (["true", "1"], ["true", "1"]),
        (["NaN", "1"], ["NaN", "1"]),
        (["+1", "1"], ["+1", "1"]),
        (["٣", "1"], ["٣", "1"]),
        (["x", ""], ["x", ""]),
        (["", ""], ["", ""]),
    ],
)
def test_a_column_of_csv_has_a_type_only_if_nothing_is_lost(place: Place, cells: list[str], expected: list[Any]) -> None:
    (place.folder / "data").write_text("id,c\n" + "".join(f"k,{cell}\n" for cell in cells))
    found = [row["c"] for row in records(place, place.folder / "data", "csv")]
    assert found == expected and [type(value) for value in found] == [type(value) for value in expected]


def test_a_malformed_line_of_csv_is_named(place: Place) -> None:
    message = place.refusal('a,b\n1,2\n"x\ny",3\n1,2,3\n"a"b,2\n', format="csv")
    assert "raw.jsonl, line 5: has 3 cells, the first line has 2" in message
    assert "raw.jsonl, line 6: not CSV" in message
    assert "two columns are called 'a'" in place.refusal("a,a\n1,2\n", format="csv")
    for header, name in ((b"a;b", "';'"), (b"a\tb", "a tab")):
        assert f"separated by {name}: write the file with commas" in place.refusal(header + b"\n1\n", format="csv")
    assert "not UTF-8" in place.refusal(b"a\n\xff\xfe\n", format="csv")


def test_a_line_that_never_ends_is_refused_and_does_not_take_all_memory(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resources.ingest.json_lines.LONGEST", 1000)
    monkeypatch.setattr("resources.ingest.json_lines.BLOCK", 300)
    long = json.dumps({"a": "x" * 5000}) + "\n"
    assert "line 2: longer than" in place.refusal('{"a": 1}\n' + long + '{"a": 2}\n')
