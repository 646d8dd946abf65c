"""Files of one folder that are wanted in another, and no others that lie there: nobody has hashed those."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path


def bring(source: Path, target: Path, names: Iterable[str], one: Callable[[Path, Path], object]) -> None:
    """`one` is what brings a file: it moves, copies or links it."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        one(source / name, target / name)


def link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    os.link(source, target)
