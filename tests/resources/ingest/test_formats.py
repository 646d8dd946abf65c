"""Input formats: records are counted, have a schema, and nothing is lost silently."""

import bz2
import datetime
import decimal
import gzip
import io
import json
import lzma
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recipes.contracts.dataset_formats import Format
from recipes.contracts.job import StoreAddress
from recipes.records.record_reader import iterate_record_lines
from recipes.storage.artifact_store import Store
from resources.datasets.diff import diff_versions
from resources.errors import HanzoError
from resources.ingest.column_schema import SchemaCounter
from resources.ingest.columnar import read_arrow, read_parquet
from resources.ingest.new_version import NewVersion
from resources.ingest.raw_file import TeeStream
from resources.ingest.source_files import SourceFile, local_files
from resources.ingest.version_creation import create_from_files
from tests.support.resources.dataset_versions import BUCKETS, Place
from tests.support.resources.record_files import ROWS, WRITERS, packed_zstd, place

__all__ = ["BUCKETS", "Store", "StoreAddress", "place"]


def zipped(data: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data", data)
    return archive.getvalue()


def records(place: Place, path: Path, format: str, **more: Any) -> list[dict[str, Any]]:
    version, _ = place.create(path, format=format, name=f"of-{format}", **more)
    found = [json.loads(line) for line in iterate_record_lines(place.store, version.artifact)]
    assert version.num_records == len(found)
    return found


@pytest.mark.requirement("B15")
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
def test_truncated_compressed_file_is_refused(place: Place, pack: Callable[[bytes], bytes]) -> None:
    data = pack(b"".join(json.dumps({"n": number}).encode() + b"\n" for number in range(5000)))
    (place.folder / "packed").write_bytes(data[:-7])
    assert "packed is not a complete " in place.refusal(place.folder / "packed")


@pytest.mark.parametrize(
    ("content", "name"),
    [(zipped(b'{"a": 1}\n'), "zip"), (lzma.compress(b'{"a": 1}\n'), "xz"), (bz2.compress(b'{"a": 1}\n'), "bzip2")],
    ids=["zip", "xz", "bzip2"],
)
@pytest.mark.parametrize("format", ["jsonl", "csv", "text"])
def test_unsupported_compression_is_named(place: Place, format: str, content: bytes, name: str) -> None:
    """Regression: the message was about a line that is not UTF-8, which did not help."""
    assert f"is a {name} file, and only gzip and zstd are supported" in place.refusal(content, format=format)


def test_text_that_begins_like_bzip2_is_read(place: Place) -> None:
    path = place.folder / "stations.txt"
    path.write_text("BZhong\n")
    assert records(place, path, "text") == [{"text": "BZhong"}]


def test_file_with_an_undecodable_name_is_refused(place: Place) -> None:
    folder = place.folder / "many"
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"n": 1}\n')
    assert "is not allowed: rename it, in UTF-8" in place.refusal(folder)


def test_folder_is_read_as_all_its_files_of_the_format_in_name_order(place: Place) -> None:
    folder = place.folder / "many"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.jsonl").write_text('{"n": 3}\n')
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"n": 1}\n{"n": 2}\n'))
    (folder / "inner" / "c.jsonl.zst").write_bytes(packed_zstd(b'{"n": 4}\n'))
    (folder / "readme.txt").write_text("not a record")
    assert records(place, folder, "jsonl") == [{"n": number} for number in (1, 2, 3, 4)]


def test_types_unknown_to_json_have_one_documented_form(place: Place) -> None:
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
            "at": pa.array([[("k", moment)]], pa.map_(pa.string(), pa.timestamp("ns"))),
            "two": pa.array([[moment, None]], pa.list_(pa.timestamp("ns"), 2)),
            "told": pa.array([moment], pa.timestamp("ns")).dictionary_encode(),
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
        "at": [["k", "2024-02-29T12:30:00.250000"]],
        "two": ["2024-02-29T12:30:00.250000", None],
        "told": "2024-02-29T12:30:00.250000",
        "kind": "a",
        "big": 2**64 - 1,
    }


REFUSED: dict[str, tuple[pa.Array, str]] = {
    "NaN": (pa.array([1.0, float("nan")]), "NaN or infinity in column 'x'"),
    "infinity in a list": (pa.array([[1.0], [float("-inf")]]), "NaN or infinity in column 'x'"),
    "NaN in a struct": (pa.array([{"a": float("nan")}]), "NaN or infinity in column 'x'"),
    "nanoseconds": (pa.array([1], pa.timestamp("ns")), "nanoseconds in column 'x'"),
    "nanoseconds in a map": (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.timestamp("ns"))), "nanoseconds in column 'x'"),
    "a zone that nobody knows": (pa.array([1], pa.timestamp("us", "Mars/Port")), "column 'x' that has no form"),
    "an interval": (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "a column 'x' of type month_day_nano_interval"),
    "a year that no text has": (pa.array([10**18], pa.timestamp("s")), "column 'x' that has no form"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_value_without_a_json_form_is_refused_by_its_column(place: Place, what: str) -> None:
    column, reason = REFUSED[what]
    table = pa.table({"good": pa.array([1] * len(column)), "x": column})
    with pa.ipc.new_file(place.folder / "data", table.schema) as out:
        out.write_table(table)
    assert reason in place.refusal(place.folder / "data", format="arrow")


def test_two_columns_of_one_name_are_refused(place: Place) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
    pq.write_table(table, place.folder / "data")
    assert "two columns 'x'" in place.refusal(place.folder / "data", format="parquet")


@pytest.mark.parametrize("format", ["jsonl", "csv", "text"])
def test_lines_in_another_encoding_are_rejected_with_the_command_to_convert_them(place: Place, format: str) -> None:
    """Windows programs write such files; the refusal of each line did not explain why."""
    for name, encoding in (("UTF-16", "utf-16"), ("UTF-32", "utf-32")):
        refusal = place.refusal('{"a": 1}\n{"a": 2}\n'.encode(encoding), format=format)
        assert f"raw.jsonl is written in {name}, and only UTF-8 is read: write it so, as `iconv -f {name}" in refusal
    assert "raw.jsonl is empty" in place.refusal(b"\xef\xbb\xbf\r\n", format=format)


@pytest.mark.parametrize(("pack", "name"), [(gzip.compress, "gzip"), (packed_zstd, "zstd")])
@pytest.mark.parametrize("writer", ["parquet", "arrow file", "arrow stream"])
def test_compressed_columnar_file_is_rejected_with_a_hint_to_unpack_it(
    place: Place, writer: str, pack: Callable[[bytes], bytes], name: str
) -> None:
    """Regression: the message was "Magic bytes not found", which did not help."""
    format, write = WRITERS[writer]
    write(place.folder / "data")
    refusal = place.refusal(pack((place.folder / "data").read_bytes()), format=format)
    assert f"is packed with {name}: unpack it before, as a {format} file can be compressed within" in refusal


def test_file_of_another_format_than_given_is_named(place: Place) -> None:
    table = pa.table({"a": [1]})
    pq.write_table(table, place.folder / "parquet")
    with pa.ipc.new_file(place.folder / "arrow", table.schema) as out:
        out.write_table(table)
    for format in ("jsonl", "csv", "text", "parquet", "arrow"):
        for kind in {"parquet", "arrow"} - {format}:
            assert f"{kind} is a {kind} file: give its format as {kind}." in place.refusal(
                place.folder / kind, format=format
            )
    assert place.create("PAR1 is a word\nARROW1 too\n", format="text")[0].num_records == 2


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1 no", b"ARROW1 neither", b"\x00" * 500])
def test_content_that_is_not_of_its_format_is_refused(place: Place, format: str, content: bytes) -> None:
    assert "that can be read" in place.refusal(content, format=format)


@pytest.mark.parametrize("format", ["parquet", "csv", "text"])
def test_file_without_records_is_refused_in_every_format(place: Place, format: str) -> None:
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


def test_overlong_line_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resources.ingest.json_lines.MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("resources.ingest.json_lines.BLOCK_BYTES", 300)
    long = json.dumps({"a": "x" * 5000}) + "\n"
    assert "line 2: longer than" in place.refusal('{"a": 1}\n' + long + '{"a": 2}\n')


def test_overlong_csv_row_is_refused_by_its_first_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resources.ingest.csv_records.MAX_LINE_BYTES", 1000)
    begins = "a,b\n1,2\n"
    for row in ("x" * 5000 + ",y\n", '"x,y\n' + "3,4\n" * 1000):
        message = place.refusal(begins + row + "5,6\n", format="csv")
        assert "raw.jsonl, line 3: longer than" in message and "more)" not in message
    longest = "x" * 995
    assert place.create(f"{begins}{longest},ok\n", format="csv")[0].num_records == 2


def cut(lines: list[str], folder: Path, parts: int, header: str) -> Path:
    """Write the same rows into `count` files."""
    folder.mkdir()
    size = -(-len(lines) // parts)
    for number in range(parts):
        (folder / f"{number:02}.csv").write_text(header + "".join(lines[number * size : (number + 1) * size]))
    return folder


def test_the_same_rows_of_csv_in_other_files_are_the_same_content(place: Place) -> None:
    """Regression: column types were inferred per file, so all-integer or empty columns changed the records."""
    rows = ["1,,7,true\n", "2,,x,\n", "2.5,3,8,false\n", "4,4,9,true\n"]
    made = []
    for parts in (1, 2, 4):
        path = cut(rows, place.folder / f"in-{parts}", parts, "whole,late,text,flag\n")
        made.append(place.create(path, format="csv"))
    assert [is_new for _, is_new in made] == [True, False, False]
    version = made[0][0]
    assert version.schema == {"flag": "boolean|null", "late": "integer|null", "text": "string", "whole": "number"}
    folder = cut(rows, place.folder / "with a bad one", 2, "whole,late,text,flag\n")
    (folder / "01.csv").write_text("whole,late,text,flag\n1,2\n")
    with pytest.raises(HanzoError, match=r"01\.csv, line 2: has 2 cells, the first line has 4"):
        place.create(folder, format="csv", name="other")


def test_csv_files_may_have_different_columns(place: Place) -> None:
    folder = place.folder / "two"
    folder.mkdir()
    (folder / "a.csv").write_text("n,t\n1,x\n")
    (folder / "b.csv").write_text("u,n\ny,0.5\n")
    assert records(place, folder, "csv") == [{"n": 1.0, "t": "x"}, {"n": 0.5, "u": "y"}]


@pytest.mark.parametrize("after", ["a\n1\nx\n", "a,b\n1,2\n", '"', ""])
def test_csv_file_changed_while_it_is_read_is_refused(place: Place, after: str) -> None:
    path = place.folder / "data"
    path.write_text("a\n1\n2\n")
    opened = 0

    def open_it() -> BinaryIO:
        nonlocal opened
        opened += 1
        if opened == 2:
            path.write_text(after)
        return path.open("rb")

    wanted = NewVersion("d", "csv", "u", "default")
    with pytest.raises(HanzoError, match="data was changed while it was read"):
        create_from_files(place.database, place.store, wanted, [SourceFile("data", open_it)])


@pytest.mark.parametrize("writer", WRITERS)
def test_file_changed_while_it_is_read_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    """Regression: Parquet and Arrow records came from one file and the recorded source from another."""
    format, write = WRITERS[writer]
    path = place.folder / "data"
    write(path)
    before = path.read_bytes()
    real = TeeStream.drain

    def to_the_end(recorded: TeeStream) -> None:
        real(recorded)
        path.write_bytes(before)

    with monkeypatch.context() as disturbed:
        disturbed.setattr(TeeStream, "drain", to_the_end)
        assert "data was changed while it was read" in place.refusal(path, format=format)
    assert place.create(path, format=format)[0].num_records == len(ROWS)


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_file_deleted_after_its_folder_was_listed_is_refused(place: Place, format: str) -> None:
    folder = place.folder / "many"
    folder.mkdir()
    for name in "ab":
        WRITERS[format][1](folder / f"{name}.{format}")
    files = local_files(folder, Format(format))
    (folder / f"b.{format}").unlink()
    with pytest.raises(HanzoError, match=f"b.{format} cannot be read"):
        create_from_files(place.database, place.store, NewVersion("d", format, "u", "default"), files)
    assert place.store.list("s3://hanzo-ml/datasets") == []


def test_too_many_columns_are_refused_at_their_record_or_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("column_schema", "record_writer", "csv_records", "columnar"):
        monkeypatch.setattr(f"resources.ingest.{module}.MAX_COLUMNS", 100)
    lines = "".join(json.dumps({f"user-{number}": number}) + "\n" for number in range(150))
    assert "raw.jsonl, record 101: brings the dataset to more than 100 columns" in place.refusal(lines)
    wide = [f"c{number}" for number in range(101)]
    assert "line 1: has 101 columns" in place.refusal(",".join(wide) + "\n", format="csv")
    table = pa.table({name: pa.array([1]) for name in wide})
    pq.write_table(table, place.folder / "wide")
    assert "wide has 101 columns" in place.refusal(place.folder / "wide", format="parquet")
    folder = place.folder / "two"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.csv").write_text(",".join(f"{name}{number}" for number in range(60)) + "\n" + "1," * 59 + "1\n")
    assert "b.csv, line 1: has a column 'b59' too many" in place.refusal(folder, format="csv")
    assert place.create(json.dumps(dict.fromkeys(wide[:100])))[0].num_records == 1


@pytest.mark.slow
def test_counting_the_schema_of_wide_records_takes_little_memory() -> None:
    seen = SchemaCounter()
    names = [f"c{number}" for number in range(5000)]
    tracemalloc.start()
    for number in range(300):
        seen.count({name: number if index == number else str(number) for index, name in enumerate(names)})
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 16 << 20, f"{used} bytes"
    assert seen.records == 300 and seen.counts()["c7"] == {"integer": 1, "string": 299}


WIDE_ROWS = 1024
WIDE = "x" * (128 << 10)


def write_wide_parquet(path: Path) -> None:
    pq.write_table(pa.table({"n": range(WIDE_ROWS), "text": [f"{n}{WIDE}" for n in range(WIDE_ROWS)]}), path)


def write_wide_dictionary(path: Path) -> None:
    text = pa.DictionaryArray.from_arrays([n % 4 for n in range(WIDE_ROWS)], [f"{n}{WIDE}" for n in range(4)])
    table = pa.table({"n": range(WIDE_ROWS), "text": text})
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table)


@pytest.mark.parametrize("writer", [write_wide_parquet, write_wide_dictionary])
def test_rows_are_read_by_their_bytes_and_not_by_their_number(tmp_path: Path, writer: Callable[[Path], None]) -> None:
    """Regression: batches of 4,096 rows took gigabytes where a row is a document."""
    writer(tmp_path / "wide")
    read = read_parquet if writer is write_wide_parquet else read_arrow
    with (tmp_path / "wide").open("rb") as stream:
        tracemalloc.start()
        count = sum(len(row["text"]) > len(WIDE) for row in read(stream) if isinstance(row, dict))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert count == WIDE_ROWS
    assert used < 64 << 20, f"{used} bytes of {WIDE_ROWS * len(WIDE)}"


CALLS = [{"where": "Lund", "day": None}, {"left": 1, "right": 2}]
SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}, "day": {"type": "number"}}}


def conversation(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
    return {"tools": [tool], "messages": messages}


def stored_lines(place: Place, path: Path, format: str) -> list[str]:
    version, _ = place.create(path, format=format, name=path.name.replace(".", "-"))
    return [line.decode().strip() for line in iterate_record_lines(place.store, version.artifact)]


def test_arguments_and_parameters_keep_their_order_and_other_keys_are_sorted(place: Place) -> None:
    (place.folder / "raw").write_text(json.dumps(conversation(CALLS[0])) + "\n")
    (line,) = stored_lines(place, place.folder / "raw", "jsonl")
    assert line.startswith('{"messages":[{"content":"q","role":"user"},')
    assert '"function":{"arguments":{"where":"Lund","day":null},"name":"f"},"type":"function"' in line
    assert '"parameters":{"type":"object","properties":{"where":{"type":"string"},"day":{"type":"number"}}}' in line


def test_reordered_arguments_make_a_new_version_without_record_differences(place: Place) -> None:
    first, _ = place.create(json.dumps(conversation({"a": 1, "b": 2})) + "\n")
    other, is_new = place.create(json.dumps(conversation({"b": 2, "a": 1})) + "\n")
    assert is_new and other.content_sha256 != first.content_sha256
    difference = diff_versions(place.store, first, other)
    assert (difference.added, difference.removed) == (0, 0)


@pytest.mark.parametrize("format", ["parquet", "arrow", "json columns"])
def test_nulls_that_a_table_adds_inside_structs_are_dropped(place: Place, format: str) -> None:
    rows = [conversation({"where": "Lund", "day": 2}), conversation({"left": 1, "right": 2})]
    (place.folder / "lines").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    if format == "json columns":
        columns = {name: pa.array([json.dumps(row[name]) for row in rows], pa.json_()) for name in ("messages", "tools")}
        table = pa.table(columns)
    if format == "arrow":
        with pa.ipc.new_file(place.folder / "table", table.schema) as out:
            out.write_table(table)
    else:
        pq.write_table(table, place.folder / "table")
    read = "arrow" if format == "arrow" else "parquet"
    assert stored_lines(place, place.folder / "table", read) == stored_lines(place, place.folder / "lines", "jsonl")


def test_map_in_a_conversation_becomes_an_object(place: Place) -> None:
    function = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    call = pa.struct([("type", pa.string()), ("function", function)])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    row = conversation({"where": "Lund", "day": None})
    asked, answered = row["messages"]
    called = {"type": "function", "function": {"name": "f", "arguments": [("where", "Lund"), ("day", None)]}}
    column = pa.array([[asked, {**answered, "tool_calls": [called]}]], pa.list_(message))
    pq.write_table(pa.table({"messages": column, "pairs": column}), place.folder / "raw")
    (found,) = records(place, place.folder / "raw", "parquet")
    assert found["messages"] == row["messages"]
    assert found["pairs"][1]["tool_calls"][0]["function"]["arguments"] == [["where", "Lund"], ["day", None]]


def test_json_and_uuid_columns_are_decoded(place: Place) -> None:
    given = ['{"b": 1, "a": null}', "[1.5]", '"x"', None]
    table = pa.table({"x": pa.array(given, pa.json_()), "id": pa.array([b"0" * 16, None, None, None], pa.uuid())})
    pq.write_table(table, place.folder / "raw")
    found = records(place, place.folder / "raw", "parquet")
    assert [row["x"] for row in found] == [{"b": 1, "a": None}, [1.5], "x", None]
    assert [row["id"] for row in found] == ["30303030-3030-3030-3030-303030303030", None, None, None]


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "not JSON"), ('{"a": 1, "a": 2}', "repeated key 'a'"), ("NaN", "not finite")]
)
def test_json_column_with_invalid_json_is_refused(place: Place, text: str, reason: str) -> None:
    pq.write_table(pa.table({"x": pa.array([text], pa.json_())}), place.folder / "raw")
    message = place.refusal(place.folder / "raw", format="parquet")
    assert "column 'x'" in message and reason in message


@pytest.mark.parametrize("answers", [["1", "2"], ["true", "false"], ["1.50", ""]])
def test_csv_columns_of_a_training_layout_stay_strings(place: Place, answers: list[str]) -> None:
    lines = [f"q{number},{answer},{answer},7\n" for number, answer in enumerate(answers)]
    (place.folder / "raw").write_text("instruction,answer,key,score\n" + "".join(lines))
    found = records(place, place.folder / "raw", "csv")
    assert [(row["answer"], row["key"], row["score"]) for row in found] == [(answer, answer, 7) for answer in answers]


@pytest.mark.parametrize("format", ["jsonl", "parquet", "csv"])
def test_partitions_are_columns(place: Place, format: str) -> None:
    folder = place.folder / "many"
    for name, number in (("year=01/lang=de", 1), ("year=02/lang=f%20r", 2), ("year=02/lang=__HIVE_DEFAULT_PARTITION__", 3)):
        (folder / name).mkdir(parents=True)
        path = folder / name / f"part-0.{format}"
        if format == "parquet":
            pq.write_table(pa.table({"n": [number]}), path)
        else:
            path.write_text(f"n\n{number}\n" if format == "csv" else f'{{"n":{number}}}\n')
    assert records(place, folder, format) == [
        {"year": "01", "lang": "de", "n": 1},
        {"year": "02", "lang": None, "n": 3},
        {"year": "02", "lang": "f r", "n": 2},
    ]
    (folder / "year=02" / "odd.jsonl").write_text('{"year": 3}\n')
    if format == "jsonl":
        with pytest.raises(HanzoError, match=r"odd\.jsonl, record 1: has another 'year' than its folder, 'year=02'"):
            place.create(folder)


def test_folder_of_splits_is_refused_with_the_command_for_one_split(place: Place) -> None:
    folder = place.folder / "saved"
    for split in ("train", "test", "odd"):
        (folder / split).mkdir(parents=True)
        pq.write_table(pa.table({"text": ["a"]}), folder / split / "data.parquet")
    command = "`hanzo-ml dataset create --name NAME --path saved/train`"
    assert command in place.refusal(folder, format="parquet")
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test", "odd"]}')
    assert "it contains the splits odd, test, train," in place.refusal(folder, format="parquet")
    assert records(place, folder / "train", "parquet") == [{"text": "a"}]


def test_hidden_files_are_skipped_and_json_files_are_read_only_without_others(place: Place) -> None:
    folder = place.folder / "many"
    (folder / ".cache").mkdir(parents=True)
    for name, content in {
        "a.ndjson": '{"n": 1}\n',
        "._a.ndjson": "\0",
        ".cache/b.jsonl": '{"n": 7}\n',
        "notes.json": '{"n": 8}\n',
        "state.json": "{}",
    }.items():
        (folder / name).write_text(content)
    (folder / "c.json.gz").write_bytes(gzip.compress(b'{"n": 2}\n'))
    version, _ = place.create(folder)
    assert version.num_records == 2
    assert version.lineage["skipped"] == ["._a.ndjson", ".cache/b.jsonl", "notes.json"]
    plain = place.folder / "plain"
    plain.mkdir()
    (plain / "notes.json").write_text('{"n": 8}\n')
    (plain / "dataset_info.json").write_text("{}")
    assert records(place, plain, "jsonl") == [{"n": 8}]


def test_keys_unused_in_training_are_listed_in_the_lineage(place: Place) -> None:
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "refusal": "x", "audio": None}]
    }
    version, _ = place.create(json.dumps(row) + "\n")
    assert version.lineage["unread"] == {"messages.refusal": 1}
