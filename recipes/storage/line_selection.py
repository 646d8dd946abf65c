"""Lines of a file as a file of their own, without a copy of them: a bit for each line says whether it is one.

So a split of a version costs one bit a record, however long the records are, and whatever else changed between two versions.
A copy in chunks would cost more than its share: with 1 % of 100,000 records replaced in one place, 53 % of the chunks of the
splits were new, since each split takes a few other records too, from everywhere.
"""

from collections.abc import Iterable, Iterator
from itertools import compress
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LineMask: TypeAlias = "NDArray[np.bool_]"
"""Of each line of a file, in their order, whether it is chosen."""


def bitmap_uri(artifact_uri: str, path: str) -> str:
    """Where the bitmap of a file that consists of chosen lines lies."""
    return f"{artifact_uri}/{path}.selection"


def origin_uri(artifact_uri: str) -> str:
    """Where stands of which artifact the files at `artifact_uri` are lines: its URI, whose manifest has the right digest."""
    return f"{artifact_uri}/chosen-of"


def pack_bitmap(marks: LineMask) -> bytes:
    """The first line is the highest bit of the first byte."""
    import numpy as np  # not as a server starts, which reads the store: few of its requests need it

    return np.packbits(marks).tobytes()


def unpack_bitmap(bitmap: bytes, records: int) -> LineMask:
    import numpy as np  # see above

    return np.unpackbits(np.frombuffer(bitmap, np.uint8), count=records).astype(np.bool_)


def iterate_line_batches(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The lines of a file, each with a newline, some at a time. Only a newline ends one; what holds nothing is none."""
    rest: list[bytes] = []
    for piece in pieces:
        first, newline, more = piece.partition(b"\n")
        rest.append(first)
        if newline:
            *whole, last = [b"".join(rest), *more.split(b"\n")]
            rest = [last]
            yield [line + b"\n" for line in whole if line.strip()]
    if (line := b"".join(rest)).strip():
        yield [line + b"\n"]


def select_lines(pieces: Iterable[bytes], marks: LineMask) -> Iterator[bytes]:
    """The chosen lines of a file."""
    seen = 0
    for lines in iterate_line_batches(pieces):
        if data := b"".join(compress(lines, marks[seen : seen + len(lines)])):
            yield data
        seen += len(lines)
