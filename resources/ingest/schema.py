"""The schema of records that were never all in memory: column -> type names."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

NAMES: Mapping[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
SHAPES = 4096
"""Kinds of records that are told apart at a time: most datasets have a handful."""


class SchemaOfMany:
    """Counts, for each column, how many records have which type in it. Types are those of JSON."""

    def __init__(self) -> None:
        self._folded = 0
        self._shapes: dict[tuple[object, ...], int] = {}
        self._columns: dict[str, Counter[str]] = {}

    def see(self, row: Mapping[str, Any]) -> None:
        # One step for a record instead of one for each of its values.
        shape = (*row, *map(type, row.values()))
        self._shapes[shape] = self._shapes.get(shape, 0) + 1
        if len(self._shapes) > SHAPES:
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
                self._columns.setdefault(str(column), Counter())[NAMES.get(kind, "null")] += count
        self._shapes.clear()
