"""Bytes in pieces of any length -> lines; no more than a line and a piece is in memory."""

from collections.abc import Iterable, Iterator


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines without their newlines; only a newline ends one."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest
