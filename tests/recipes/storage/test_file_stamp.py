"""File stamps: detect whether a hashed file has changed without hashing it again."""

import os
from pathlib import Path

import pytest

from recipes.storage.artifact_store import read_file_stamp


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"as it was")
    return tmp_path / "file"


def with_the_time_of(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_replaced_file_of_equal_size_and_time_has_a_new_stamp(file: Path, tmp_path: Path) -> None:
    before, known = file.stat(), read_file_stamp(file)
    other = tmp_path / "other"
    other.write_bytes(b"as it is!")
    with_the_time_of(other, before)
    other.replace(file)
    assert read_file_stamp(file) != known


def test_file_modified_in_place_has_a_new_stamp(file: Path) -> None:
    before, known = file.stat(), read_file_stamp(file)
    with file.open("r+b") as opened:
        opened.write(b"as it is!")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert read_file_stamp(file) != known
    with_the_time_of(file, before)
    assert read_file_stamp(file) == known, "all that is looked at is the same"
    with file.open("ab") as opened:
        opened.write(b"more")
    with_the_time_of(file, before)
    assert read_file_stamp(file) != known


def test_missing_file_has_no_stamp(file: Path) -> None:
    assert read_file_stamp(file.with_name("nothing")) is None
    assert read_file_stamp(file / "below a file") is None
