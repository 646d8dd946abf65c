"""Build step of the wheel: add root files and the commit as package data.

`resources/installation.py` reads them from there.
"""

import shutil
import subprocess
from pathlib import Path

from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent
FILES = ("dagster.yaml", "workspace.yaml", "requirements.lock")
TARGET = "resources/package_data"


class BuildWithPackageData(build_py):
    """Adds the package data, except to an editable install, which reads the checkout's files."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / TARGET
        target.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(ROOT / name, target / name)
        (target / "COMMIT").write_text(f"{commit()}\n")


def commit() -> str:
    """Return the commit being built; `none` if it is unknown or files were changed."""
    recorded = ROOT / "COMMIT"
    if not (ROOT / ".git").exists():
        return recorded.read_text().strip() if recorded.is_file() else "none"
    return "none" if git("diff", "HEAD") else git("rev-parse", "HEAD") or "none"


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
