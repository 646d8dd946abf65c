"""File formats of raw datasets, and the selection of files in a folder."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

FormatName = Literal["jsonl", "parquet", "csv", "arrow", "text"]
"""For models whose schemas must list the values inline."""


class Format(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"
    CSV = "csv"
    ARROW = "arrow"
    TEXT = "text"


ENDINGS: Mapping[str, tuple[str, ...]] = {
    Format.JSONL: (".jsonl", ".ndjson"),
    Format.PARQUET: (".parquet",),
    Format.CSV: (".csv",),
    Format.ARROW: (".arrow", ".feather", ".ipc", ".arrows"),
    Format.TEXT: (".txt", ".text"),
}
COMPRESSIONS = (".gz", ".zst")
LINE_FORMATS = (Format.JSONL, Format.CSV, Format.TEXT)
"""Formats whose files may be compressed as a whole; the others have internal compression."""
JSON_ENDING = ".json"
"""Ending of compressed JSON lines; uncompressed, it may also be metadata about a folder's files."""
DESCRIPTION_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Metadata that the library `datasets` writes next to the records."""
SPLITS_FILE = "dataset_dict.json"
"""Marks a folder whose subfolders are splits."""
SPLIT_FOLDERS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}


def has_format(name: str, format: str) -> bool:
    """Return whether a file name has an ending of the format."""
    endings = ENDINGS.get(format, (f".{format}",))
    packed = [ending + compression for ending in endings for compression in COMPRESSIONS if format in LINE_FORMATS]
    if format == Format.JSONL:
        packed += [JSON_ENDING + compression for compression in COMPRESSIONS]
    name = name.lower()
    return name.endswith((*endings, *packed)) and not is_description(name)


def is_description(name: str) -> bool:
    """Return whether a file describes a folder's files, rather than holding records."""
    return name in DESCRIPTION_FILES or (name.endswith(COMPRESSIONS) and name.rpartition(".")[0] in DESCRIPTION_FILES)


def detect_formats(names: Iterable[str]) -> list[str]:
    """Detect formats by file endings; never text, since any file can be read as text."""
    known = [format for format in Format if format is not Format.TEXT]
    return sorted({str(format) for name in names for format in known if has_format(file_name(name), format)})


def file_name(path: str) -> str:
    return path.rpartition("/")[2]


def walk_files(folder: Path) -> list[str]:
    """List all files in a folder recursively, without following links to folders."""
    found = [(Path(place).relative_to(folder) / name).as_posix() for place, _, names in os.walk(folder) for name in names]
    return sorted(found, key=lambda path: path.split("/"))


def is_hidden(path: str) -> bool:
    """Return whether a component of a path starts with a dot.

    macOS creates such files next to others.
    """
    return any(part.startswith(".") for part in path.split("/"))


class MixedSplits(Exception):
    """A folder contains several splits, which one dataset would mix.

    `folders` are the splits' paths in it.
    """

    def __init__(self, folders: tuple[str, ...]) -> None:
        super().__init__(", ".join(folders))
        self.folders = folders

    @property
    def first(self) -> str:
        """The training split's folder, if one has such a name."""
        return next(
            (folder for folder in self.folders if SPLIT_FOLDERS.get(file_name(folder).lower()) == "train"), self.folders[0]
        )

    def advice(self, command: str) -> str:
        """Return instructions for the user.

        `command` creates a dataset of one of the folders.
        """
        first = self.first
        return (
            f"it contains the splits {self}, which one dataset would mix. `{command}` uses one of them. To keep all of them "
            f"separate, rename their folders to split={file_name(first)} and so on: each record then names its split, and "
            "`split: {column: split}` in a definition or a preparation preserves it"
        )


@dataclass(frozen=True)
class SelectedFiles:
    """Paths in a folder: files to read, and files that look similar but are skipped."""

    chosen: tuple[str, ...]
    skipped: tuple[str, ...]


def select_files(paths: Iterable[str], format: str) -> SelectedFiles:
    """Select the files of a folder to read as a format, in the given order.

    Raises:
        MixedSplits: they belong to several splits.
    """
    every = list(paths)
    visible = [path for path in every if not is_hidden(path)]
    refuse_mixed_splits(visible)
    chosen = [path for path in visible if has_format(file_name(path), format)]
    plain = [path for path in visible if is_plain_json(file_name(path))] if format == Format.JSONL else []
    if plain and not detect_formats(visible):
        chosen, plain = plain, []
    hidden = [path for path in every if is_hidden(path) and has_format(file_name(path), format)]
    refuse_mixed_split_folders(chosen)
    return SelectedFiles(tuple(chosen), tuple(sorted([*hidden, *plain])))


def is_plain_json(name: str) -> bool:
    return name.lower().endswith(JSON_ENDING) and not is_description(name.lower())


def refuse_mixed_splits(paths: Sequence[str]) -> None:
    """Raise MixedSplits if a metadata file declares the folder as one of splits."""
    for place in (path.removesuffix(SPLITS_FILE) for path in paths if file_name(path) == SPLITS_FILE):
        below = [path.removeprefix(place) for path in paths if path.startswith(place)]
        folders = sorted({f"{place}{path.partition('/')[0]}" for path in below if "/" in path})
        if len(folders) > 1:
            raise MixedSplits(tuple(folders))


def refuse_mixed_split_folders(paths: Iterable[str]) -> None:
    """Raise MixedSplits if sibling folders are named like splits."""
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        before, _, _ = path.rpartition("/")
        while before:
            above, _, folder = before.rpartition("/")
            if split := SPLIT_FOLDERS.get(folder.lower()):
                found.setdefault(above, {}).setdefault(split, before)
            before = above
    for folders in found.values():
        if len(folders) > 1:
            raise MixedSplits(tuple(sorted(folders.values())))


NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


def partition_columns(path: str) -> dict[str, str | None]:
    """Return the columns in a path's folder names, such as `lang=de`.

    They apply to all records below.
    """
    pairs = (part.partition("=") for part in path.split("/")[:-1] if "=" in part)
    return {unquote(key): None if value == NULL_PARTITION else unquote(value) for key, _, value in pairs if key}
