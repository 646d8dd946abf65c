"""Dataset formats: which files of a folder are read, and in which order."""

from pathlib import Path
from typing import get_args

import pytest

from recipes.contracts.dataset_formats import ENDINGS, Format, FormatName, has_format, select_files, walk_files


def test_every_format_has_a_name_in_schemas_and_file_endings() -> None:
    assert [*Format] == [*get_args(FormatName)] == [*ENDINGS]


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("a.jsonl", Format.JSONL, True),
        ("A.CSV.GZ", Format.CSV, True),
        ("a.feather", Format.ARROW, True),
        ("a.parquet.zst", Format.PARQUET, False),
        ("a.csv", Format.JSONL, False),
        ("a.ndjson.zst", Format.JSONL, True),
        ("a.json.gz", Format.JSONL, True),
        ("a.json", Format.JSONL, False),
        ("dataset_info.json.gz", Format.JSONL, False),
    ],
)
def test_file_format_is_detected_by_name(name: str, format: Format, expected: bool) -> None:
    assert has_format(name, format) is expected


@pytest.mark.parametrize(
    ("names", "format", "chosen", "skipped"),
    [
        (["a.txt", "b.json"], Format.TEXT, ["a.txt"], []),
        (["a.txt", "b.json"], Format.JSONL, ["b.json"], []),
        (["a.csv", "b.json", "c.jsonl"], Format.JSONL, ["c.jsonl"], ["b.json"]),
        (["a.csv", "b.json"], Format.JSONL, [], ["b.json"]),
        (["a.csv", "b.json"], Format.CSV, ["a.csv"], []),
        ([".a.csv", "x/._b.csv", "x/c.csv", ".DS_Store"], Format.CSV, ["x/c.csv"], [".a.csv", "x/._b.csv"]),
        (["state.json", "dataset_info.json", "data.arrow"], Format.ARROW, ["data.arrow"], []),
    ],
)
def test_folder_selects_files_of_the_format(names: list[str], format: Format, chosen: list[str], skipped: list[str]) -> None:
    found = select_files(names, format)
    assert (list(found.chosen), list(found.skipped)) == (chosen, skipped)


def test_files_are_ordered_folder_by_folder(tmp_path: Path) -> None:
    """The order of earlier releases, so that equal files give the same version."""
    for folder in ("a", "a-b", "10", "1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_text("{}")
    expected = sorted(tmp_path.rglob("*.jsonl"))
    assert [tmp_path / path for path in select_files(walk_files(tmp_path), Format.JSONL).chosen] == expected
