"""Non-Python files of the product: the stack's YAML files, lock file and commit.

A checkout and our image have them in the root folder. A wheel has them as package data, copied there by
`deploy/package_data.py`.
"""

import re
import subprocess
from pathlib import Path

DAGSTER_FILE = "dagster.yaml"
WORKSPACE_FILE = "workspace.yaml"
LOCK_FILE = "requirements.lock"
COMMIT_FILE = "COMMIT"
"""Written by the build of an image or a wheel, which has no git."""
NO_COMMIT = "none"

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGE_DATA = Path(__file__).resolve().parent / "package_data"
SOURCE = CHECKOUT if (CHECKOUT / WORKSPACE_FILE).is_file() else PACKAGE_DATA
"""The folder with the files above. Processes start there, so that a checkout's modules are found first."""


def git_commit(source: Path) -> str:
    """Return the checkout's commit, or the one recorded by the build."""
    return recorded_commit(source) or git(source, "rev-parse", "HEAD") or NO_COMMIT


def git_diff(source: Path) -> str:
    """Return uncommitted changes of tracked files; empty without git."""
    return "" if recorded_commit(source) else git(source, "diff", "HEAD")


def recorded_commit(source: Path) -> str | None:
    """Return the commit that a build recorded; None in a checkout.

    An installed wheel must not ask git: its environment may be inside a user's repository.
    """
    file = source / COMMIT_FILE
    if (source / ".git").exists() or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8").strip()
    return text if re.fullmatch(r"[0-9a-f]{40,64}", text) else NO_COMMIT


def git(source: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(source), *arguments], capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
