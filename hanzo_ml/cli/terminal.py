"""Text of others on the user's terminal, which acts on what it is sent: a line of a script's log named its window, moved
lines away that it had shown, and wrote to the clipboard.

As git does with what a server says, colours pass where there may be some, and any other control character is shown.
"""

import re

from rich.markup import escape

COLOUR = r"(\x1b\[[0-9;:]*m)"
MOVES = r"\x1b\[[0-?]*[ -/]*[@-~]"
"""Of the cursor, and erasures, by which progress bars draw over themselves: to lines below one another they mean nothing."""
CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
IN_A_LOG = re.compile(f"{COLOUR}|{MOVES}|(?P<control>{CONTROL})")


def in_colour(text: str) -> str:
    """A line of a log."""
    return IN_A_LOG.sub(lambda found: found[1] or (shown(found[0]) if found["control"] else ""), text)


def plain(text: str) -> str:
    """A name or a message, which would colour, or widen, what stands beside it."""
    return re.sub(CONTROL, lambda found: shown(found[0]), text)


def in_markup(text: str) -> str:
    """The same where Rich's marks stand around it, of which it has none itself."""
    return escape(plain(text))


def shown(control: str) -> str:
    """As it is typed, such as ^[ for escape; one that no key has by its number."""
    return f"^{chr(ord(control) ^ 0x40)}" if control < "\x80" else f"\\x{ord(control):02x}"
