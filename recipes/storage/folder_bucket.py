"""A store that is a folder: a bucket is made once, and one that is not there later is away, and not empty.

A network folder that is not mounted is an empty one, or none. It read as an empty store: a training that was taken up at
such a moment began anew.
"""

from pathlib import Path

from recipes.addresses import local_root
from recipes.contracts.job import StoreAddress

INSIDE = ".bucket"
"""The mark in a bucket's folder, where no key leads. A put that was on its way as the folder went away makes another one of
its name, as the library does: that one has none.
"""


def mark_of(root: Path, name: str) -> Path:
    """What says beside the root that a bucket was made in it."""
    return root.with_name(f".{root.name}-made") / name


def make(root: Path, name: str) -> Path:
    """The folder of a bucket, made and marked where it never was. Raises OSError."""
    folder, mark = root / name, mark_of(root, name)
    if not mark.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INSIDE).touch()
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    return folder


def away(address: StoreAddress) -> Path | None:
    """The mark of a bucket that was made and is not there: it is not mounted, or was moved away."""
    root = local_root(address)
    if root is None:
        return None
    names = (name for name in address.buckets.values() if mark_of(root, name).exists() and not is_there(root / name))
    return next((mark_of(root, name) for name in names), None)


def is_there(bucket: Path) -> bool:
    """False too where a network folder says that it does not answer, which it does in many ways."""
    try:
        return (bucket / INSIDE).exists()
    except OSError:
        return False
