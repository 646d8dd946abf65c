"""Collect the source files that a command job takes along."""

import subprocess
from pathlib import Path
from typing import Any

from hanzo_ml.cli.connection import Refused

EXCLUDED_FOLDERS = {"__pycache__", "node_modules", "venv"}
"""Folders that hold nobody's own source files; nor do those whose names begin with a dot."""


def attach_code(config: Path, document: dict[str, Any]) -> None:
    """Replace the key `code` of a job file by `files`, with paths relative to the file itself."""
    place = config.parent
    code = document.pop("code", None)
    if code is not None and not isinstance(code, str):
        raise Refused(f"`code:` in {config} must be a file or a folder beside it, such as code: ./src")
    found = list_source_files(place, code) if code else find_named_files(place, document["command"])
    if found:
        document["files"] = {**(document.get("files") or {}), **{path: read_text(file) for path, file in found.items()}}
        if commit := read_git_commit(place):
            document.setdefault("git_commit", commit)


def list_source_files(place: Path, code: str) -> dict[str, Path]:
    """All source files of a folder by their path in it, or the one file by its name."""
    source = place / code
    if source.is_file():
        return {source.name: source}
    if not source.is_dir():
        raise Refused(f"there is no {source}: check `code:`")
    files = (file for file in sorted(source.rglob("*")) if file.is_file() and not file.is_symlink())
    found = {file.relative_to(source): file for file in files}
    return {path.as_posix(): file for path, file in found.items() if not any(is_excluded(part) for part in path.parts)}


def read_git_commit(folder: Path) -> str:
    """The commit of the checkout that a folder lies in; empty where it lies in none."""
    try:
        done = subprocess.run(["git", "-C", folder, "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def is_excluded(part: str) -> bool:
    return part.startswith(".") or part in EXCLUDED_FOLDERS


def find_named_files(place: Path, command: Any) -> dict[str, Path]:
    """Files beside the job file that a word of the command names."""
    words = [word for word in command if isinstance(word, str) and word] if isinstance(command, list) else []
    relative = [word.removeprefix("./") for word in words if not Path(word).is_absolute() and ".." not in Path(word).parts]
    return {word: place / word for word in relative if (place / word).is_file()}


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Refused(f"{file} is no text: `code:` takes source files, data belongs into a dataset") from None
