"""Listing a folder of the store."""

import os
from pathlib import Path

from recipes.storage.buckets import list_folder, scan_folder, walk_files


def test_file_deleted_during_listing_hides_no_other(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"x")
    first, gone, last = (entry.name for entry in os.scandir(tmp_path))
    found = scan_folder(tmp_path)
    assert next(found) == (first, 1)
    (tmp_path / gone).unlink()
    assert [*found] == [(last, 1)]


def test_file_name_with_number_sign_is_not_treated_as_partial(tmp_path: Path) -> None:
    """Partial files end in `#` and a number, as the library names unfinished files."""
    for name in ("c#", "c#sharp", "c#1a", "1#2 of 3", "whole", "half#12"):
        (tmp_path / name).write_bytes(name.encode())
    whole = {("c#", 2), ("c#sharp", 7), ("c#1a", 4), ("1#2 of 3", 8), ("whole", 5)}
    assert {*list_folder(tmp_path)[0]} == {(path.name, size) for path, size in walk_files(tmp_path)} == whole
