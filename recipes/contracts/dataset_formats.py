"""File formats of raw datasets, how their files are named, and which files of a folder are read."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

FormatName = Literal["jsonl", "parquet", "csv", "arrow", "text"]
"""For models of requests and definitions, whose schemas list the values in place."""


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
"""Formats whose files may be compressed as a whole; the others compress within."""
JSON_ENDING = ".json"
"""Of JSON lines too where it is compressed. Else it may be of anything that is said of a folder's files."""
DESCRIPTION_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What the library `datasets` writes beside the records."""
SPLITS_FILE = "dataset_dict.json"
"""Makes a folder one of splits, each in a folder of its own."""
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
    """Whether a file's name ends as those of a format do."""
    endings = ENDINGS.get(format, (f".{format}",))
    packed = [ending + compression for ending in endings for compression in COMPRESSIONS if format in LINE_FORMATS]
    if format == Format.JSONL:
        packed += [JSON_ENDING + compression for compression in COMPRESSIONS]
    name = name.lower()
    return name.endswith((*endings, *packed)) and not is_description(name)


def is_description(name: str) -> bool:
    """Whether a file says something of a folder's files, and holds no records."""
    return name in DESCRIPTION_FILES or (name.endswith(COMPRESSIONS) and name.rpartition(".")[0] in DESCRIPTION_FILES)


def detect_formats(names: Iterable[str]) -> list[str]:
    """The formats of files, by their endings. Text is none: anything can be read as that."""
    known = [format for format in Format if format is not Format.TEXT]
    return sorted({str(format) for name in names for format in known if has_format(file_name(name), format)})


def file_name(path: str) -> str:
    return path.rpartition("/")[2]


def walk_files(folder: Path) -> list[str]:
    """The paths of all files within a folder, folder by folder. Links to folders are not followed."""
    found = [(Path(place).relative_to(folder) / name).as_posix() for place, _, names in os.walk(folder) for name in names]
    return sorted(found, key=lambda path: path.split("/"))


def is_hidden(path: str) -> bool:
    """Whether a path within a folder, or a folder on its way, begins with a dot, as what macOS leaves beside files does."""
    return any(part.startswith(".") for part in path.split("/"))


class MixedSplits(Exception):
    """A folder holds splits, which one dataset would mix. `folders` are those of the splits, within the folder."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        super().__init__(", ".join(folders))
        self.folders = folders

    @property
    def first(self) -> str:
        """The folder of what is trained on, where one is called so."""
        return next(
            (folder for folder in self.folders if SPLIT_FOLDERS.get(file_name(folder).lower()) == "train"), self.folders[0]
        )

    def advice(self, command: str) -> str:
        """What to do, given a command that creates a dataset of one of the folders."""
        first = self.first
        return (
            f"it holds the splits {self}, which one dataset would mix. `{command}` takes one of them. To keep all as they "
            f"are, rename their folders to split={file_name(first)} and so on: each record then says its split, and "
            "`split: {column: split}` in a definition or a preparation keeps it"
        )


@dataclass(frozen=True)
class SelectedFiles:
    """Paths within a folder: those that are read, and those that look like it and are not."""

    chosen: tuple[str, ...]
    skipped: tuple[str, ...]


def select_files(paths: Iterable[str], format: str) -> SelectedFiles:
    """Which files of a folder are read as a format, in the order in which they are given.

    Raises:
        MixedSplits: they are those of several splits.
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
    """Raises MixedSplits: a file says that the folder is one of splits."""
    for place in (path.removesuffix(SPLITS_FILE) for path in paths if file_name(path) == SPLITS_FILE):
        below = [path.removeprefix(place) for path in paths if path.startswith(place)]
        folders = sorted({f"{place}{path.partition('/')[0]}" for path in below if "/" in path})
        if len(folders) > 1:
            raise MixedSplits(tuple(folders))


def refuse_mixed_split_folders(paths: Iterable[str]) -> None:
    """Raises MixedSplits: folders that lie side by side are called as splits are."""
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
    """The columns that the folders of a path say, as `lang=de`: the values of all records below, as texts."""
    pairs = (part.partition("=") for part in path.split("/")[:-1] if "=" in part)
    return {unquote(key): None if value == NULL_PARTITION else unquote(value) for key, _, value in pairs if key}
