"""Tables in Markdown."""

import re
from collections.abc import Sequence


def render_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(map(escape_cell, line))} |" for line in lines)


def escape_cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
