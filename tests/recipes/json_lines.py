"""JSON lines files as users write them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one row per line, with keys in the rows' own order."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
