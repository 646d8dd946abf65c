"""Count the column types of records that are streamed, not held in memory."""

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
"""Maximum number of distinct record shapes that are counted separately: most datasets have a handful."""


MAX_SHAPE_COLUMNS = 1 << 18
"""Maximum number of columns of all these shapes together, so that wide records take no more memory than narrow ones."""
MAX_COLUMNS = 10_000
"""Maximum number of columns of a dataset. A dataset with more has values as column names, and each column has a cost."""


class TooManyColumns(Exception):
    """There are too many columns.

    The message completes a sentence that begins with the record's name.
    """


class SchemaCounter:
    """Counts, for each column, how many records have which JSON type in it."""

    def __init__(self) -> None:
        self._folded = 0
        self._shapes: dict[tuple[object, ...], int] = {}
        self._size = 0
        self._names: set[str] = set()
        self._columns: dict[str, Counter[str]] = {}

    def count(self, row: Mapping[str, Any]) -> None:
        """Count a record. Raises TooManyColumns: with it, the dataset has more columns than allowed."""
        # One dictionary lookup per record instead of one for each of its values.
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
        """Return the number of records by column and type name."""
        self._fold()
        return {column: dict(sorted(kinds.items())) for column, kinds in sorted(self._columns.items())}

    def schema(self) -> dict[str, str]:
        """Return the type names of each column.

        They end in `?` if not all records have the column.
        """
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
