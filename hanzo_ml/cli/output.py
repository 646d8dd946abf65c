"""Print tables and JSON, with control characters of others made harmless."""

import codecs
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Control characters in text from others act on the user's terminal: a line of a script's log set the window title, moved
# lines that were shown, and wrote to the clipboard.
#
# As in git's output of a server's messages, colors pass in logs, and every other control character is shown as text.

COLOR_SEQUENCE = r"(\x1b\[[0-9;:]*m)"
CURSOR_SEQUENCE = r"\x1b\[[0-?]*[ -/]*[@-~]"
"""Cursor movements and erasures, with which progress bars redraw themselves; meaningless in a log."""
CONTROL_CHARACTER = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
LOG_PATTERN = re.compile(f"{COLOR_SEQUENCE}|{CURSOR_SEQUENCE}|(?P<control>{CONTROL_CHARACTER})")


def sanitize_log_line(text: str) -> str:
    """Make a line of a log safe for a terminal. Colors pass."""
    return LOG_PATTERN.sub(lambda found: found[1] or (caret_notation(found[0]) if found["control"] else ""), text)


def sanitize_text(text: str) -> str:
    """Make a name or a message safe for a terminal, colors included."""
    return re.sub(CONTROL_CHARACTER, lambda found: caret_notation(found[0]), text)


def sanitize_markup(text: str) -> str:
    """Make text safe inside Rich markup."""
    return escape(sanitize_text(text))


def caret_notation(control: str) -> str:
    """Caret notation, such as ^[ for escape; by number for C1 controls."""
    return f"^{chr(ord(control) ^ 0x40)}" if control < "\x80" else f"\\x{ord(control):02x}"


UNCUT_COLUMNS = ("job", "run", "sweep", "dataset", "model", "recipe", "checks")
"""Columns that are never wrapped."""

PIPE_WIDTH = 10_000
"""Width without a terminal. At 80, one row became six lines, of which `grep` found one."""

JSON_CONTROL_CHARACTER = re.compile("[\\x7f-\\x9f]")
"""Characters that JSON allows unescaped and that act on a terminal."""

COLUMN_GAP = 2
"""Spaces between two columns."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def print_json(document: Any) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False)
    print(escape_json_controls(text if can_print(text) else json.dumps(document, indent=2)))


def escape_json_controls(text: str) -> str:
    """Escape control characters in JSON."""
    return JSON_CONTROL_CHARACTER.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str, *, across: bool = False) -> None:
    """Print rows as a table, or `empty` if there are none.

    `across` keeps columns side by side on a narrow console.
    """
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = Console(highlight=False, markup=False, width=width)  # names may look like markup
    lines = [[sanitize_text(str(cell)) for cell in row] for row in rows]
    if not lines:
        console.print(empty)
        return
    least = minimum_widths(columns, lines)
    spare = console.width - sum(least) - COLUMN_GAP * (len(columns) - 1)
    if not across and spare < 0:
        for line in lines:
            console.print("\n".join((f"{columns[0]} {line[0]}", *stacked_cells(columns[1:], line[1:]))))
        return
    drawn = Table(box=None, pad_edge=False)
    for column, width in zip(columns, column_widths(least, columns, lines, spare), strict=True):
        drawn.add_column(column, overflow="fold", no_wrap=column in UNCUT_COLUMNS, width=width)
    for line in lines:
        drawn.add_row(*line)
    console.print(drawn)


def minimum_widths(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[int]:
    """Minimum width of each column that keeps the words of its heading whole."""
    cells = zip(columns, zip(*lines, strict=True), strict=True)
    return [max(map(cell_len, (*name.split(), *(cell if name in UNCUT_COLUMNS else ())))) for name, cell in cells]


def column_widths(
    least: Sequence[int], columns: Sequence[str], lines: Sequence[Sequence[str]], spare: int
) -> Sequence[int | None]:
    """Width of each column: its minimum plus a share of the `spare` characters.

    If the minimum widths do not fit, Rich decides. It is not left to do so otherwise, because it breaks words of headings
    next to columns with room.
    """
    if spare < 0:
        return [None] * len(columns)
    cells = zip(columns, zip(*lines, strict=True), strict=True)
    whole = [max(cell_len(line) for text in (name, *cell) for line in text.split("\n")) for name, cell in cells]
    wanted = [most - low for most, low in zip(whole, least, strict=True)]
    found = list(least)
    for done, place in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        share = min(wanted[place], spare // (len(wanted) - done))
        found[place] += share
        spare -= share
    return found


def stacked_cells(columns: Sequence[str], line: Sequence[str]) -> Iterator[str]:
    """The non-empty cells of a row, one per line."""
    longest = max(map(len, columns), default=0)
    return (f"  {name:<{longest}}  {cell}" for name, cell in zip(columns, line, strict=True) if cell)


# Replacements for characters that the terminal's encoding lacks.

STAND_INS = {
    "✓": "+",
    "✗": "x",
    "↑": "^",
    "↓": "v",
    "→": "->",
    "…": "...",
    "\N{EN DASH}": "-",
    "—": "-",
    "·": "-",
    "≥": ">=",
    "≤": "<=",
    "─": "-",
    "│": "|",
    "└": "`",
    "├": "|",
    "█": "#",
}
HANDLER = "hanzo_ml.ascii_stand_ins"


def replace_characters(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: replace characters; those without a replacement become question marks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(STAND_INS.get(character, "?") for character in text), error.end


def adapt_streams() -> None:
    """Make output work in any encoding: `model prove` crashed on its check mark under `PYTHONIOENCODING=ascii`."""
    codecs.register_error(HANDLER, replace_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests may replace the stream
            stream.reconfigure(errors=HANDLER)


def can_print(text: str) -> bool:
    """Whether the encoding of standard output has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
