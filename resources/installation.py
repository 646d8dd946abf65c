"""Files of the product that are not modules: the stack's YAML files, the lock file, and the commit.

A checkout has them in its root folder, and so has our image. A wheel carries them as package data, copied there by
`deploy/package_data.py`.
"""

import re
import subprocess
from pathlib import Path

DAGSTER_FILE = "dagster.yaml"
WORKSPACE_FILE = "workspace.yaml"
LOCK_FILE = "requirements.lock"
COMMIT_FILE = "COMMIT"
"""Written where there is no git to ask: by the build of an image or of a wheel."""
NO_COMMIT = "none"

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGE_DATA = Path(__file__).resolve().parent / "package_data"
SOURCE = CHECKOUT if (CHECKOUT / WORKSPACE_FILE).is_file() else PACKAGE_DATA
"""The folder that holds the files above. Processes start in it, so that a checkout's modules are found first."""


def git_commit(source: Path) -> str:
    """The commit of a checkout, or the one that was recorded when an image or a wheel was built."""
    return recorded_commit(source) or git(source, "rev-parse", "HEAD") or NO_COMMIT


def git_diff(source: Path) -> str:
    """Uncommitted changes of tracked files; empty without git."""
    return "" if recorded_commit(source) else git(source, "diff", "HEAD")


def recorded_commit(source: Path) -> str | None:
    """The commit that a build recorded; None in a checkout.

    Git is not asked there: a wheel's environment may lie in a user's repository, whose commit is not ours.
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
