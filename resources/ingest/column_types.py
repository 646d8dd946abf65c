"""The types of CSV's columns over all files of a dataset, known before the first record is made.

Each file by itself had types of its own: in one whose values were all whole, a column of numbers was one of integers, and
the same rows in files that were cut elsewhere were other content.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from resources.ingest.column_schema import COLUMNS
from resources.ingest.csv_records import Kind, csv_kinds, joined
from resources.ingest.problems import Problem, Problems
from resources.ingest.raw_file import Borrowed, Damaged, unpacked
from resources.ingest.source_files import SourceFile


def column_types(files: Sequence[SourceFile], problems: Problems) -> Mapping[str, Kind]:
    """Column -> type. All that is wrong with the files is added to `problems`."""
    found: dict[str, Kind] = {}
    for file in files:
        with file.open() as stream:
            try:
                kinds = csv_kinds(unpacked(Borrowed(stream)), partial(problems.add, file.name))
            except Damaged as damage:
                problems.add(file.name, Problem(str(damage)))
                continue
        for name, kind in kinds.items():
            found[name] = joined(found.get(name, Kind.UNKNOWN), kind)
        if len(found) > COLUMNS:
            problems.add(
                file.name, Problem(f"has a column '{name[:100]}' too many: all files have at most {COLUMNS}", "line 1")
            )
            break
    return found
