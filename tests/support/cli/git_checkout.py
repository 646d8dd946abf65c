"""A git checkout with one commit."""

import subprocess
from pathlib import Path


def committed(folder: Path) -> str:
    """Commit everything in the folder to a new repository and return the commit."""
    user = ("-c", "user.name=ada", "-c", "user.email=ada@example.com")
    for arguments in (("init", "-q"), ("add", "."), (*user, "commit", "-q", "-m", "one")):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()
