"""Files of a cache that several jobs fill at once: each writes beside the place, and puts what is whole there.

What was killed meanwhile leaves its own part behind, which goes when somebody fetches into the same folder a day later.
"""

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

ABANDONED_SECONDS = 24 * 3600
"""Of a part that nobody wrote to for so long, nobody will."""
PART = re.compile(r"\.\d+-[0-9a-f]{16}\.part")


@contextmanager
def put_when_whole(target: Path) -> Iterator[BinaryIO]:
    """A file to write what `target` shall be: it is there when the block ends, and as it was when the block fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_parts(target.parent)
    # Short, whatever the target is called: a name has its limit.
    part = target.with_name(f".{os.getpid()}-{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as out:
            yield out
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def remove_abandoned_parts(folder: Path) -> None:
    for path in folder.glob(".*.part"):
        with suppress(FileNotFoundError):  # another was faster, or has just put it in its place
            if PART.fullmatch(path.name) and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()
