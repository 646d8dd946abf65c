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

# Text of others on the user's terminal, which acts on what it is sent: a line of a script's log named its window, moved
# lines away that it had shown, and wrote to the clipboard.
#
# As git does with what a server says, colours pass where there may be some, and any other control character is shown.

COLOR_SEQUENCE = r"(\x1b\[[0-9;:]*m)"
CURSOR_SEQUENCE = r"\x1b\[[0-?]*[ -/]*[@-~]"
"""Of the cursor, and erasures, by which progress bars draw over themselves: to lines below one another they mean nothing."""
CONTROL_CHARACTER = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
LOG_PATTERN = re.compile(f"{COLOR_SEQUENCE}|{CURSOR_SEQUENCE}|(?P<control>{CONTROL_CHARACTER})")


def sanitize_log_line(text: str) -> str:
    """A line of a log."""
    return LOG_PATTERN.sub(lambda found: found[1] or (caret_notation(found[0]) if found["control"] else ""), text)


def sanitize_text(text: str) -> str:
    """A name or a message, which would colour, or widen, what stands beside it."""
    return re.sub(CONTROL_CHARACTER, lambda found: caret_notation(found[0]), text)


def sanitize_markup(text: str) -> str:
    """The same where Rich's marks stand around it, of which it has none itself."""
    return escape(sanitize_text(text))


def caret_notation(control: str) -> str:
    """As it is typed, such as ^[ for escape; one that no key has by its number."""
    return f"^{chr(ord(control) ^ 0x40)}" if control < "\x80" else f"\\x{ord(control):02x}"


UNCUT_COLUMNS = ("job", "run", "sweep", "dataset", "model", "recipe", "checks")
"""Columns of names and of verdicts, which a narrow console does not cut."""

PIPE_WIDTH = 10_000
"""Columns where no terminal reads: cut at 80, one row was six lines, of which `grep` found one."""

JSON_CONTROL_CHARACTER = re.compile("[\\x7f-\\x9f]")
"""Characters that JSON may have as they are, and on which a terminal acts."""

COLUMN_GAP = 2
"""Between two columns."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def print_json(document: Any) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False)
    print(escape_json_controls(text if can_print(text) else json.dumps(document, indent=2)))


def escape_json_controls(text: str) -> str:
    """The same JSON, on which no terminal acts."""
    return JSON_CONTROL_CHARACTER.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str, *, across: bool = False) -> None:
    """Rows as a table; `empty` says what to do where there are none. What is read `across` stays side by side."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = Console(highlight=False, markup=False, width=width)  # a name may look like markup
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
    """The width of each column below which its heading is broken: of a sweep of four hyperparameters, one was four lines."""
    cells = zip(columns, zip(*lines, strict=True), strict=True)
    return [max(map(cell_len, (*name.split(), *(cell if name in UNCUT_COLUMNS else ())))) for name, cell in cells]


def column_widths(
    least: Sequence[int], columns: Sequence[str], lines: Sequence[Sequence[str]], spare: int
) -> Sequence[int | None]:
    """The width of each column: its least, and its share of the columns that are to `spare` beside those. Where the least
    does not fit the library decides; left to itself, it breaks a heading in a word beside a column with room.
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
    """The cells of a row one below the other, but for those that are empty."""
    longest = max(map(len, columns), default=0)
    return (f"  {name:<{longest}}  {cell}" for name, cell in zip(columns, line, strict=True) if cell)


# Characters that the encoding of the terminal lacks.

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
    """Error handler of a codec. A character without a stand-in becomes a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(STAND_INS.get(character, "?") for character in text), error.end


def adapt_streams() -> None:
    """Print on any terminal: `model prove` crashed on its check mark under `PYTHONIOENCODING=ascii`, with exit code 1."""
    codecs.register_error(HANDLER, replace_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test may have put another one there
            stream.reconfigure(errors=HANDLER)


def can_print(text: str) -> bool:
    """Whether standard output has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
