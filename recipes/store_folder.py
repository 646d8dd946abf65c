"""A store that is a folder: it is made once, and what is not there later is away, and not empty.

A network folder that is not mounted is an empty one, or none. It read as an empty store: a training that was taken up at
such a moment began anew.
"""

from contextlib import suppress
from pathlib import Path

from recipes.addresses import local_root
from recipes.schema import StoreAddress


def is_away(address: StoreAddress) -> bool:
    """Whether a store was made in a folder that holds none of its buckets: it is not mounted, or was moved away."""
    root = local_root(address)
    return (
        root is not None and mark_of(root).exists() and not any(is_there(root / name) for name in address.buckets.values())
    )


def mark_of(root: Path) -> Path:
    """What says beside a folder that a store was made in it."""
    return root.with_name(f".{root.name}-made")


def make(root: Path, name: str) -> Path:
    """The folder of a bucket, made where it is not there yet."""
    folder, mark = root / name, mark_of(root)
    folder.mkdir(parents=True, exist_ok=True)
    if not mark.exists():
        with suppress(OSError):  # of a folder beside which nobody may write, or of a full disk: the next one tries again
            mark.touch()
    return folder


def is_there(folder: Path) -> bool:
    """False too where a network folder says that it does not answer, which it does in many ways."""
    try:
        return folder.is_dir()
    except OSError:
        return False
