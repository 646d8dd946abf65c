"""The schema of records that were never all in memory: column -> type names."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

TYPE_NAMES: Mapping[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
MAX_SHAPES = 4096
"""Kinds of records that are told apart at a time: most datasets have a handful."""


MAX_SHAPE_COLUMNS = 1 << 18
"""Columns of all those kinds together: what is told apart of wide records takes no more memory than of narrow ones."""
MAX_COLUMNS = 10_000
"""Of one dataset. Each is counted here, described by every check and shown as one: more are values that became names."""


class TooManyColumns(Exception):
    """The message says what to do, as what follows the name of the record."""


class SchemaCounter:
    """Counts, for each column, how many records have which type in it. Types are those of JSON."""

    def __init__(self) -> None:
        self._folded = 0
        self._shapes: dict[tuple[object, ...], int] = {}
        self._size = 0
        self._names: set[str] = set()
        self._columns: dict[str, Counter[str]] = {}

    def count(self, row: Mapping[str, Any]) -> None:
        """Count a record. Raises TooManyColumns: with it they are more than a dataset may have."""
        # One step for a record instead of one for each of its values.
        shape = (*row, *map(type, row.values()))
        if known := self._shapes.get(shape):
            self._shapes[shape] = known + 1
            return
        self._names.update(row)
        if len(self._names) > MAX_COLUMNS:
            raise TooManyColumns(
                f"brings the dataset to more than {MAX_COLUMNS} columns: write names that are values as an array of objects"
            )
        self._shapes[shape] = 1
        self._size += len(row)
        if len(self._shapes) > MAX_SHAPES or self._size > MAX_SHAPE_COLUMNS:
            self._fold()

    @property
    def records(self) -> int:
        return self._folded + sum(self._shapes.values())

    def counts(self) -> dict[str, dict[str, int]]:
        """Column -> type name -> number of records."""
        self._fold()
        return {column: dict(sorted(kinds.items())) for column, kinds in sorted(self._columns.items())}

    def schema(self) -> dict[str, str]:
        """Column -> type names; a column that is not always there ends in `?`."""
        return {
            column: "|".join(kinds) + ("" if sum(kinds.values()) == self.records else "?")
            for column, kinds in self.counts().items()
        }

    def _fold(self) -> None:
        for shape, count in self._shapes.items():
            self._folded += count
            half = len(shape) // 2
            for column, kind in zip(shape[:half], shape[half:], strict=True):
                self._columns.setdefault(str(column), Counter())[TYPE_NAMES.get(kind, "null")] += count
        self._shapes.clear()
        self._size = 0
